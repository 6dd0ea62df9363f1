"""The `shardnet` command.

main.py finds the command: run.py (with launch/, which keeps the workers), rendezvous.py, status.py and top.py, doctor.py, plan.py,
checkpoint.py, certs.py, demo.py and bench.py. arguments.py and protection.py are what their arguments have in common.

What they print: table.py (with grid.py, units.py and screen.py) and plan_table.py. What they need besides: services.py (of a cluster),
plan_model.py (a model to plan for), programs.py (what comes with shardnet); __main__.py.
"""
