"""Writes the dashboards: `make docs`, or `python deploy/grafana/generate.py [folder]`. A test holds them up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from quality import quality
from serving import serving


def main(folder: Path) -> None:
    for dashboard in (quality(), serving()):
        (folder / f"{dashboard['uid']}.json").write_text(json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("dashboards"))
