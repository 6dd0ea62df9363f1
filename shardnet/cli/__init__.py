"""The `shardnet` command.

main.py finds the command: run.py (with launch/, which runs the workers), rendezvous.py, status.py and top.py, doctor.py, plan.py,
checkpoint.py, certs.py, demo.py and bench.py. arguments.py and protection.py have what their arguments share.

Output: table.py (with grid.py, units.py and screen.py) and plan_table.py. Helpers: services.py (a rendezvous, its page, what a
worker says), plan_model.py (the model to plan for), programs.py (finds programs that come with shardnet); __main__.py.
"""
