"""The real core under a virtual clock, with simulated workers, hosts, networks and faults.

Pure and seeded, standard library only: one seed is one history, on any machine. Workers follow the
protocol that ``worker.worker`` follows; the state they train is the list of generations that
computed each of its steps, so that a lost, repeated or mixed step shows in the value itself.

    report = simulate(SimScenario(...))
"""

from elastic_ft.sim.checks import SimViolation as SimViolation
from elastic_ft.sim.runs import Report as Report
from elastic_ft.sim.runs import simulate as simulate
from elastic_ft.sim.scenario import SimFault as SimFault
from elastic_ft.sim.scenario import SimKill as SimKill
from elastic_ft.sim.scenario import SimScenario as SimScenario
from elastic_ft.sim.scenario import sim_policy as sim_policy
