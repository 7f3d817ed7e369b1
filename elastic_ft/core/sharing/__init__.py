"""Several jobs on one cluster: who has how many workers, where, and why. Pure.

``core.scheduling`` decides. Its parts: ``asks`` (what it is told, and asks for), ``ledger`` (what
it knows), ``dealing`` (what it does after each event), ``admission`` (who runs), ``fair`` (who gets
how much), ``rooms`` (where), ``desk`` (the scratch pad).
"""
