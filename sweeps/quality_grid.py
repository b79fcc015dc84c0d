"""Train model sizes with plain and fast settings for a budget: what quality each reaches, and when.

python sweeps/quality_grid.py                                     two sizes, two minutes of training each
python sweeps/quality_grid.py --profile runs/NAME/best.yaml       with the settings that a speed grid recommends
python sweeps/quality_grid.py --steps 2000 --target 0.25          as many steps for each, not as many seconds
"""

import sys

from tinydit_ray.sweep.cli import quality_grid, run

if __name__ == "__main__":
    sys.exit(run(quality_grid, sys.argv[1:]))
