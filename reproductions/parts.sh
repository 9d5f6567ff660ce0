#!/bin/sh
# Several parts of tables.sh side by side on one GPU, which small models cannot fill one after the other.
#
#     KAIROSFL_DATA=... [LIMIT=1500] sh reproductions/parts.sh aware-cifar100 "EVERY=10 fedcl-lstm" "SEEDS=3 EVERY=5 aware-stored"
#
# Words before the name of a part are settings for tables.sh. Each part stops after LIMIT seconds or Ctrl-C, resumes if it is run
# again, and has a folder and a log in runs/parts; results are added to those in results/ at the end.
set -eu
folder=runs/parts
command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d || true # so that processes do not take turns
lanes=
trap 'kill -TERM $lanes; wait' INT TERM
for lane; do
    part=${lane##* } settings=
    [ "$part" = "$lane" ] || settings=${lane% *}
    mkdir -p "$folder/$part"
    env LIMIT="${LIMIT:-1500}" $settings RUNS="$folder/$part" sh "$(dirname "$0")/tables.sh" "$part" "$folder/$part/results" >"$folder/$part/log" 2>&1 &
    lanes="$lanes $!"
done
wait || true # Ctrl-C ends this wait; the trap has waited for the parts
for lane; do
    part=${lane##* }
    echo "$part: $(tail -n 1 "$folder/$part/log")"
done
${PYTHON:-python} - "$folder" <<'END'
import sys
from pathlib import Path

from kairosfl_reproductions.results import read, save

for path in sorted(Path(sys.argv[1]).glob("*/results/*.json")):
    print(save(read(path), Path("results")))
END
