"""What comes from others does no harm: no code in what is loaded, no HTML that runs, no path out of the folder, no
password where others read it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from analysis_help import make_grid_sweep, product, script
from sweep_help import ROOT, TINY, sweep

from analysis.browser import Browser, chromium
from tinydit_ray.config import from_mapping
from tinydit_ray.record import Record
from tinydit_ray.sweep.plan import Cell

SOURCES = [p for name in ("tinydit_ray", "sweeps", "analysis") for p in sorted((ROOT / name).rglob("*.py"))]
# cifar10.py reads torchvision's pickled batches by an unpickler that knows arrays alone (test_data_sources.py)
PICKLES = {"tinydit_ray/data/cifar10.py"}
NEVER = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.unsafe_load", "yaml.full_load", "os.system"}


def calls(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Every call of a file: its name as written, and its keyword arguments as written."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            words = {word.arg or "**": ast.unparse(word.value) for word in node.keywords}
            found.append((ast.unparse(node.func), words))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_is_read_can_run_code(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for function, words in calls(path):
        assert function not in NEVER, function
        assert function != "torch.load" or words.get("weights_only") == "True"
        assert function != "yaml.load" or words.get("Loader") in ("_GridLoader", "yaml.BaseLoader")
        assert function not in ("np.load", "numpy.load") or words.get("allow_pickle", "False") == "False"
        assert words.get("shell", "False") == "False", function
    assert "import pickle" not in path.read_text("utf-8") or name in PICKLES


EVIL = "<img src=x onerror=\"window.owned='yes'\"><script>window.owned='yes'</script>"
LINK = "javascript:window.owned='yes'"


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a sweep in which every word that others may choose is HTML."""
    pytest.importorskip("jinja2")
    top = tmp_path_factory.mktemp("evil")
    words = ("cell_name", "reason", "node_id", "data_source", "git_commit", "product_version", "effective.device")

    def change(record: Record) -> Record:
        evil = {name: f"{name} {EVIL}" for name in words} | {"flags": f"few-steps,{EVIL}"}
        bad = {"status": "failed", "ms_per_step": None, "speedup_vs_control": None, "velocity_mse": None}
        return evil | (bad if record["config.precision"] == "bf16" else {})

    content = {"name": EVIL, "git_commit": EVIL, "machine": {"cpu": EVIL, "cores": 2, "gpus": [EVIL]},
               "versions": {"torch": EVIL}, "data": {"source": EVIL, "digest": LINK},
               "command": [EVIL, LINK], "tracking": {"uri": LINK, "experiment": EVIL}}  # fmt: skip
    make_grid_sweep(top / "<b onclick=alert(1)>", product(precision=["fp32", "bf16"]), change=change, content=content)
    done = script("report.py", ".", "--out", "page.html", "--no-plots", cwd=top)
    assert (done.returncode, done.stderr) == (0, "")
    return top / "page.html"


@pytest.mark.slow
def test_words_of_others_are_text_in_the_report(evil_page: Path) -> None:
    text = evil_page.read_text("utf-8")
    assert text.count("<script") == 1  # the page's own
    assert "<img src=x" not in text
    assert "&lt;img src=x" in text
    assert 'href="javascript:' not in text


@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="no Chromium")
def test_html_in_names_does_not_run_in_a_browser(evil_page: Path) -> None:
    with Browser() as browser:
        page = browser.page(evil_page.as_uri())
        page.wait("document.querySelectorAll('td.name').length >= 2")
        assert page.js("window.owned === undefined")
        assert page.js("document.querySelectorAll('img[src=x]').length") == 0
        assert "onerror" in page.js("document.querySelector('td.name').innerText")  # it is there, as text
        assert page.errors == []


ODD_NAMES = ["../../etc/passwd", "/etc/passwd", "a\0b", "n" * 300, "..", "a\nb", "ü" * 300, "-rf *"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_cells_name_becomes_one_plain_folder_name(name: str, tmp_path: Path) -> None:
    config = from_mapping({})
    slug = Cell(config=config, control=config, cell_id="0123456789ab", name=name).slug
    (tmp_path / slug).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [slug]
    assert (tmp_path / slug).resolve().parent == tmp_path.resolve()
    assert slug.endswith("-0123456789ab")
    assert len(slug.encode()) < 255


@pytest.mark.slow
def test_a_password_in_the_tracking_uri_is_nowhere_in_what_is_printed_or_written(tmp_path: Path) -> None:
    done = sweep(
        "speed_grid.py", *TINY, "--no-ray", "--name", "x", "--tracking-uri", "http://ann:s3cret@127.0.0.1:9",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "s3cret" not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
