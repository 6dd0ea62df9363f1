"""`make compose-test`: runs the cluster of compose.yaml for real, hurts it, and looks at what it does.

    console     what is said while it runs, and what it ends with
    engine      docker and docker-compose, or the Compose plugin
    image       the image that all containers run, from a base that can be had
    story       what the nodes say, and when
    cluster     one cluster: its containers, its story, and the end of all that it had
    traffic     which way the bytes of a training go
    scenarios   a training that nothing happens to, and one to which everything does

Of the standard library alone, since it comes before any environment. Everything is seen from outside: logs with the engine's timestamps,
`shardnet status` in a container, counters of network interfaces, exit statuses.
"""
