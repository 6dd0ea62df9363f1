"""What `shardnet top` shows: `pace` makes rates of what was seen from one look to the next, `chronicle` events, and `screen` draws both."""
