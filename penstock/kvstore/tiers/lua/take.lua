-- Room for blocks: those that are in the index were used now, the others are taken in, and the ones used longest ago
-- go for them. Leased blocks do not go, nor those of the same call. (One that is going and not yet deleted may be taken
-- in again and leased: then it is deleted all the same, and its entry is one without a block.)
--
-- ARGV     budget, keep, grace in ms, n, then n times key and bytes, then keys that the caller did not find
--
-- Replies  {{1 taken or 0 refused, …}, {keys put out to make room}, {keys whose time was over}, the index's clock}. The
--          caller deletes the blocks of both lists. A leased block that became larger (it was lost, and comes anew, or
--          two stored it in two ways) is refused, and out of the index, where there is no room for the rest of it. A key
--          that was not found is forgotten if its entry is older than the grace: a younger one may be of a writer that
--          has its room and still writes.
--
-- Crash    after: what was put out stays until its time is over, or until it is used, and then is taken in again or
--          deleted. What was taken in and never written is forgotten by the first who does not find it.

local first = clock
settle()
local expired = age()
local evicted, taken = {}, {}

local function make_room(size)
  while held + size > budget and settle() > 0 do end
  if held + size > budget then return false end
  while sum + size > budget do
    local oldest = redis.call('ZPOPMIN', USED)
    if not oldest[1] then
      if settle() == 0 then return false end
    elseif tonumber(oldest[2]) > first then
      redis.call('ZADD', USED, oldest[2], oldest[1])
      return false
    else
      sum = sum - size_of(oldest[1])
      redis.call('HDEL', SIZES, oldest[1])
      evicted[#evicted + 1] = oldest[1]
    end
  end
  return true
end

local last = 4 + 2 * tonumber(ARGV[4])
for i = 5, last, 2 do
  local key, size = ARGV[i], tonumber(ARGV[i + 1])
  local ok = 1
  local kept, change = redis.call('ZSCORE', HELD, key), size - size_of(key)
  if kept or change == 0 then redis.call('ZADD', kept and HELD or USED, tick(), key) end
  if kept and change ~= 0 and (change < 0 or make_room(change)) then
    if redis.call('ZSCORE', HELD, key) then held = held + change end  -- making room may have ended its lease
    sum = sum + change
    redis.call('HSET', SIZES, key, size)
  elseif change ~= 0 then
    drop(key)
    if make_room(size) then
      redis.call('ZADD', USED, tick(), key)
      redis.call('HSET', SIZES, key, size)
      sum = sum + size
    else
      ok = 0
    end
  end
  taken[#taken + 1] = ok
end

for i = last + 1, #ARGV do
  local score = redis.call('ZSCORE', USED, ARGV[i]) or redis.call('ZSCORE', HELD, ARGV[i])
  if score and tonumber(score) <= (now - ARGV[3]) * 1000 then drop(ARGV[i]) end
end
save()
return {taken, evicted, expired, clock}
