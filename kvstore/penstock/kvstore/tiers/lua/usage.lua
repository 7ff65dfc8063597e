-- Return the size of the index.
--
-- ARGV     budget, keep
--
-- Replies  {number of blocks, their bytes, budget in bytes, number of blocks that are leased now}

local leased = redis.call('ZCOUNT', ENDS, string.format('(%.0f', now), '+inf')
return {redis.call('ZCARD', USED) + redis.call('ZCARD', HELD), sum, budget, leased}
