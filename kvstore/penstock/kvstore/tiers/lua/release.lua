-- End an owner's leases on blocks.
--
-- ARGV     budget, keep, owner, then keys
--
-- Replies  the number of leases that ended
--
-- Crash    before: the leases expire.

local count = 0
for i = 4, #ARGV do
  local key = ARGV[i]
  local was = redis.call('HGET', LEASES, key)
  local owners, last = was and cjson.decode(was) or {}, 0
  if owners[ARGV[3]] then
    owners[ARGV[3]] = nil
    for owner, over in pairs(owners) do
      if over <= now then owners[owner] = nil else last = math.max(last, over) end
    end
    if last == 0 then
      free(key)
    else
      redis.call('HSET', LEASES, key, cjson.encode(owners))
      redis.call('ZADD', ENDS, last, key)
    end
    count = count + 1
  end
end
save()
return count
