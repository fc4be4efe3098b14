"""Where the time of a run goes: accounting, report, and the copy in MLflow."""

from framework.goodput.accounting import Goodput as Goodput
from framework.goodput.accounting import Interval as Interval
from framework.goodput.accounting import account as account
from framework.goodput.accounting import timeline as timeline
