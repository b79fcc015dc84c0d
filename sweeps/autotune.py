"""Find the fastest training setup of this machine without timing the full product of the switches.

python sweeps/autotune.py                            the switches of grids/tune-cpu.yaml or tune-gpu.yaml
python sweeps/autotune.py --set precision=fp32,bf16 --set compile=off,default
"""

import sys

from tinydit_ray.sweep.cli import autotune, run

if __name__ == "__main__":
    sys.exit(run(autotune, sys.argv[1:]))
