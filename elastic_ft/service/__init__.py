"""The service: one Ray actor per cluster that takes jobs in, shares the cluster out, and tells.

Who decides is ``core.scheduling``; what it is told is journalled first (``chronicle``), in one
thread (``office``). What follows from that is done job by job, in others (``hands``): submit,
ask for another size, ask for a stop. It reads run folders (``story``) and asks the cluster who has
what (``cluster_watch``). Jobs are the cluster's: nothing of theirs lives in here, and the service's
death stops none.
"""
