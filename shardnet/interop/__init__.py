"""PyTorch's own code on shardnet: `torch.distributed.init_process_group("shardnet")`.

registration   how torch learns of the name
meeting        how the ranks of a job find each other through torch's store
rendezvous     how they find each other if shardnet's rendezvous has placed them
store          torch's store in that case
world          the connections of the ranks
process_group  the process group that torch makes for "shardnet", and its end
collectives    torch's collectives, translated into calls of `Backend`
overloads      the other forms in which torch calls them
mixed          groups in which other backends have some devices
reordered      groups whose ranks do not ascend
sparse         sums of sparse tensors
carrying       tensors in the form that a `Backend` takes
work           torch's handles of running collectives
reducers       keeps works for which DDP waits in C++
profiled       what torch's profiler shows of them
ends           the threads on which callbacks of torch's futures run
"""
