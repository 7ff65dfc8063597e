-- Return the size of the index.
--
-- ARGV     budget, keep
--
-- Replies  {number of blocks, their bytes, budget in bytes, number of blocks that are leased now, of those that are retained now}

local leased = redis.call('ZCOUNT', ENDS, string.format('(%.0f', now), '+inf')
local later = string.format('(%.0f', clock)
local retained = redis.call('ZCOUNT', USED, later, '+inf') + redis.call('ZCOUNT', HELD, later, '+inf')
return {redis.call('ZCARD', USED) + redis.call('ZCARD', HELD), sum, budget, leased, retained}
