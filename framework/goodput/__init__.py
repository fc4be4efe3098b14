"""Where the time of a run goes: accounting, report, and the copy in MLflow."""

from framework.goodput.accounts.account import account as account
from framework.goodput.accounts.account import timeline as timeline
from framework.goodput.accounts.results import Goodput as Goodput
from framework.goodput.accounts.results import Interval as Interval
