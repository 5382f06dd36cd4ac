"""Every dashboard, in the order of their page."""

from epikv_lab.dashboards.experiments import EXPERIMENTS
from epikv_lab.dashboards.fleet import FLEET
from epikv_lab.dashboards.kv import KV
from epikv_lab.dashboards.policies import POLICIES
from epikv_lab.dashboards.serving import SERVING

ALL = (SERVING, KV, POLICIES, EXPERIMENTS, FLEET)
