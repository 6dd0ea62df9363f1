"""shardnet beside DeepSpeed, torchft and hivemind: `python -m benchmarks.peers --help`.

course.py is what all of them train, and each with_*.py trains it with one library, one process per rank. contest.py starts them and lets
them step in turn, gauges.py reads memory and bytes, and tables.py shows the results. course.py and with_*.py run where shardnet is not
installed.
"""
