"""PyTorch's own code on shardnet: `torch.distributed.init_process_group("shardnet")`.

registration   how torch learns of the name
meeting        how the ranks of a job find each other through torch's store
rendezvous     how they do where shardnet's own has placed them
store          what torch keeps in a store there
world          their connections
process_group  what torch makes of "shardnet", and how it ends
collectives    torch's collectives, in the words of `Backend`
overloads      the other forms in which torch calls them
mixed          groups in which other backends have some devices
reordered      groups whose ranks do not ascend
sparse         sums of sparse tensors
carrying       tensors as a `Backend` takes them
work           torch's handles of what is under way
profiled       what torch's profiler shows of them
ends           the threads on which callbacks of torch's futures run
"""
