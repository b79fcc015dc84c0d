"""Time and score a grid of training setups; with no argument the five published ones.

python sweeps/speed_grid.py --help
"""

import sys

from tinydit_ray.sweep.cli import run, speed_grid

if __name__ == "__main__":
    sys.exit(run(speed_grid, sys.argv[1:]))
