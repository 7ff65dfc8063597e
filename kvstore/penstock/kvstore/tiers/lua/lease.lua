-- Lease those blocks that are in the index: no script evicts them before the owner's lease ends.
--
-- ARGV     budget, keep, owner, lease in ms, then keys
--
-- Replies  the number of leased blocks
--
-- Crash    after: the leases expire.

local count = 0
local till = now + ARGV[4]
for i = 5, #ARGV do
  local key = ARGV[i]
  local score = redis.call('ZSCORE', USED, key)
  if score then
    redis.call('ZREM', USED, key)
    redis.call('ZADD', HELD, score, key)
    held = held + size_of(key)
  end
  if score or redis.call('ZSCORE', HELD, key) then
    local was = redis.call('HGET', LEASES, key)
    local owners, last = was and cjson.decode(was) or {}, till
    owners[ARGV[3]] = till
    for owner, over in pairs(owners) do
      if over <= now and owner ~= ARGV[3] then owners[owner] = nil else last = math.max(last, over) end
    end
    redis.call('HSET', LEASES, key, cjson.encode(owners))
    redis.call('ZADD', ENDS, last, key)
    count = count + 1
  end
end
save()
return count
