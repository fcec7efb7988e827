"""The tables of the README and of docs/ are those of the benchmarks' JSON, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.readme import PAGES, ROOT, rendered

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_figures_are_those_of_the_json(page: Path) -> None:
    text = page.read_text()
    assert rendered(text) == text, "run: python -m benchmarks.readme"


def test_tables_are_there() -> None:
    readme, kernels = (page.read_text() for page in PAGES)
    assert "<!-- figures: cpu -->\n\n| what" in readme and "<!-- figures: h200 -->\n\n| what" in readme
    assert "<!-- ladder: gemm NN -->\n\n| variant" in kernels and "<!-- figures: h200/membound -->\n\n| what" in kernels


def test_every_page_of_the_docs_is_made() -> None:
    assert set((ROOT / "docs").glob("*.md")) <= set(PAGES)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", prose) if not link.startswith("http")]
    assert links and all((page.parent / link).exists() for link in links), links
