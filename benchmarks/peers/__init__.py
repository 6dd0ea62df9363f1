"""shardnet beside DeepSpeed, torchft and hivemind: `python -m benchmarks.peers --help`.

course.py is what all train, with_*.py how each does, one process a rank; contest.py starts them and lets them step in turn, gauges.py
reads memory and bytes, and tables.py says what came of it. course.py and with_*.py run where shardnet is not installed.
"""
