"""What ``elastic-ft run`` needs to disturb a run; it finds this module by its entry point."""

from chaos.disturbance import disturbed
from chaos.expect import judge_demo
from chaos.network import network_lacks
from chaos.scenario import arm, load_scenario

__all__ = ["arm", "disturbed", "judge_demo", "load_scenario", "network_lacks"]
