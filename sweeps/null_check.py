"""Time one cell against itself: the noise floor of this machine, and the smallest difference it can show.

python sweeps/null_check.py                      8 comparisons of 30 s each
python sweeps/null_check.py --comparisons 20     once, for the false-winner rate
"""

import sys

from tinydit_ray.sweep.cli import null_check, run

if __name__ == "__main__":
    sys.exit(run(null_check, sys.argv[1:]))
