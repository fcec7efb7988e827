"""The README's tables are those of the benchmarks' JSON, and its links lead somewhere."""

from __future__ import annotations

import re

from benchmarks.readme import ROOT, rendered

TEXT = (ROOT / "README.md").read_text()


def test_figures_are_those_of_the_json() -> None:
    assert "<!-- figures: cpu -->\n\n| what" in TEXT and "<!-- figures: h200 -->\n\n| what" in TEXT
    assert rendered(TEXT) == TEXT, "run: python -m benchmarks.readme"


def test_links_lead_somewhere() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", prose) if not link.startswith("http")]
    assert links and all((ROOT / link).exists() for link in links), links
