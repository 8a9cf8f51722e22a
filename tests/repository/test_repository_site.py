"""The documentation site: it builds without a warning or a network, and what its extensions make of pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build_site() -> ModuleType:
    return loaded(ROOT / ".ci" / "build_site.py")


def extension(name: str) -> ModuleType:
    return loaded(ROOT / "docs" / "_extensions" / f"{name}.py")


def test_contents_are_the_pages_that_follow_the_mark() -> None:
    source = [
        "# T\n\n[before](before.md)\n\n<!-- contents -->\n\n- [a](a.md#part)\n- [b](../b.md)\n- [a again](a.md)\n[web](https://x.y/z.md)\n"
    ]
    extension("contents").put_contents(None, "index", source)
    assert "```{toctree}\n:hidden:\n:maxdepth: 1\n\na\n../b\n```" in source[0]
    listed = ["<!-- contents: ../decisions/* -->\n"]
    extension("contents").put_contents(None, "decisions", listed)
    assert listed == ["```{toctree}\n:glob:\n:maxdepth: 1\n\n../decisions/*\n```\n"]


def test_claims_leave_the_front_matter_for_a_box_below_the_heading() -> None:
    page = "---\nclaims:\n  - name: a-claim\n    statement: E|g|_2 <= $|x|_1$ * 2\n    verdict: correction\n---\n\n# Title\n\nText.\n"
    source = [page]
    extension("claims_box").put_box(None, "theory/page", source)
    before, box, after = source[0].partition(
        '<details class="admonition claims"><summary>1 claim, checked by'
    )
    assert before == "# Title\n\n"
    assert r"- `a-claim`: *holds after correction*. E\|g\|\_2 \<= $|x|_1$ \* 2" in box + after
    assert source[0].endswith("</details>\n\nText.\n")
    plain = ["# Title\n\nText.\n"]
    extension("claims_box").put_box(None, "page", plain)
    assert plain == ["# Title\n\nText.\n"]


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ('<script src="https://cdn.example/x.js"></script>', ["page.html loads https://cdn.example/x.js"]),
        ('<link rel="stylesheet" href="//fonts.example/f.css">', ["page.html loads //fonts.example/f.css"]),
        ("<style>@import 'https://f.example/a.css'</style>", ["page.html loads https://f.example/a.css"]),
        (
            "<style>a { background: url(http://f.example/a.png) }</style>",
            ["page.html loads http://f.example/a.png"],
        ),
        ('<a href="https://example.org">a link</a><script src="_static/x.js"></script><img src="a.png">', []),
    ],
)
def test_what_a_page_loads_from_a_network_is_found(
    build_site: ModuleType, tmp_path: Path, text: str, remote: list[str]
) -> None:
    (tmp_path / "page.html").write_text(text)
    assert list(build_site.loaded_from_a_network(tmp_path)) == remote


@pytest.fixture
def small_machine(tmp_path: Path) -> Path:
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'docs' / '_extensions')!r})\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "extensions = ['myst_parser', 'mathml', 'claims_box']\nmyst_enable_extensions = ['dollarmath']\n"
    )
    return tmp_path


def built(folder: Path) -> int:
    from sphinx.cmd.build import main

    return main(["-b", "html", "-W", "--keep-going", "-q", str(folder), str(folder / "out")])


def test_latex_becomes_mathml_and_what_is_not_understood_ends_the_build(small_machine: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    pytest.importorskip("math_core", reason="the extra `docs` is not installed")
    (small_machine / "index.md").write_text("# T\n\nA slope $\\frac{a}{b}$:\n\n$$\\sum_i x_i$$\n")
    assert built(small_machine) == 0
    page = (small_machine / "out" / "index.html").read_text()
    assert "<mfrac><mi>a</mi><mi>b</mi></mfrac>" in page
    assert 'display="block"' in page
    assert "MathJax" not in page
    (small_machine / "index.md").write_text("# T\n\n$\\nosuchcommand x$\n")
    assert built(small_machine) != 0


def test_a_page_shows_its_claims_in_a_box(small_machine: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    pytest.importorskip("math_core", reason="the extra `docs` is not installed")
    claim = "claims:\n  - name: a-claim\n    statement: It holds for $x_1$.\n    verdict: holds\n"
    (small_machine / "index.md").write_text(f"---\n{claim}---\n\n# T\n\nText.\n")
    assert built(small_machine) == 0
    page = (small_machine / "out" / "index.html").read_text()
    box = page[page.index('<details class="admonition claims">') : page.index("</details>")]
    assert "<msub><mi>x</mi><mn>1</mn></msub>" in box
    assert "a-claim" in box
    assert "Text." not in box
