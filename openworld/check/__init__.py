"""Checks of a data folder and its queue, for `openworld check`: they only read, also beside a service."""

from openworld.check.report import Finding, Report
from openworld.check.run import check_folder
