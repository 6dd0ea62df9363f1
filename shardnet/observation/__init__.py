"""A cluster seen from outside: `observer` asks, `replies` parses the replies, `views` has the results; `follower` looks repeatedly,
`rates` and `chronicle` say what has changed between looks.
"""
