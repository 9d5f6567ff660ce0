"""Values that other projects published for their own benchmarks: one file per source, data only."""

from __future__ import annotations

from kairosfl_reproductions.public import blazefl, fl_simulator, flute, niid_bench, pfl

ITEMS = (*niid_bench.ITEMS, *fl_simulator.ITEMS, *pfl.ITEMS, *blazefl.ITEMS, *flute.ITEMS)
