// What the report uses of Observable Plot and D3. In an empty folder, with a copy of this file, plot-0.6.17.min.js is made by
//   npm install @observablehq/plot@0.6.17 d3@7.9.2 esbuild@0.28.2
//   npx esbuild entry.js --bundle --minify --legal-comments=none --outfile=plot-0.6.17.min.js
import { areaY, axisX, axisY, dot, gridY, identity, line, plot, raster, rect, ruleY, scale, text } from "@observablehq/plot";
import { brushX, csvFormatRows, cumsum, deviation, extent, format, interpolateViridis, lab, least, max, mean, min } from "d3";
import { pointer, range, scaleLinear, scaleLog, select, sort, ticks, zip, zoom, zoomIdentity } from "d3";

const Plot = { areaY, axisX, axisY, dot, gridY, identity, line, plot, raster, rect, ruleY, scale, text };
const reading = { csvFormatRows, cumsum, deviation, extent, least, max, mean, min, range, sort, zip };
const drawing = { brushX, format, interpolateViridis, lab, pointer, scaleLinear, scaleLog, select, ticks, zoom, zoomIdentity };
Object.assign(globalThis, { Plot, d3: { ...reading, ...drawing } });
