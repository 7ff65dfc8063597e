-- Return what the index has of its server.
--
-- ARGV     budget, keep
--
-- Replies  {blocks, bytes, budget, blocks leased now}

local leased = redis.call('ZCOUNT', ENDS, string.format('(%.0f', now), '+inf')
return {redis.call('ZCARD', USED) + redis.call('ZCARD', HELD), sum, budget, leased}
