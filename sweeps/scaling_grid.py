"""How well training scales over workers (DDP): 1, 2, 4 … of them, with one batch shared and with a batch each.

python sweeps/scaling_grid.py                             as many workers as this machine has CPUs for
python sweeps/scaling_grid.py --workers 1,2,4 --cpus-per-worker 2 --scaling strong
python sweeps/scaling_grid.py --device cuda --set precision=fp32,bf16
"""

import sys

from tinydit_ray.sweep.cli import run, scaling_grid

if __name__ == "__main__":
    sys.exit(run(scaling_grid, sys.argv[1:]))
