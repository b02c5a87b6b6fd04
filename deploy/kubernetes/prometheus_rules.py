"""Write monitoring/prometheus-rules.yaml from the rules of Prometheus: `make docs` runs it.

A PrometheusRule has the same groups as a rule file, so the text is only indented, with its comments.
"""

from pathlib import Path
from textwrap import indent

HERE = Path(__file__).parent
RULES = HERE.parent / "prometheus" / "rules" / "openworld.rules.yml"
RESOURCE = HERE / "monitoring" / "prometheus-rules.yaml"
HEAD = """\
# Written from deploy/prometheus/rules by `make docs`. Change the rules there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: openworld
spec:
"""


def resource() -> str:
    return HEAD + indent(RULES.read_text(), "  ")


if __name__ == "__main__":
    RESOURCE.write_text(resource())
