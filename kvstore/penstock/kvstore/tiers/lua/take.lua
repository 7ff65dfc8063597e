-- Reserve space for KV blocks. Blocks that are in the index are marked as used now. The other blocks are added, and the
-- least recently used blocks are evicted for them, retained ones last. The script evicts no leased block and no block of
-- the same call. (A process may add and lease an evicted block again before the block is deleted: the deletion still happens, and leaves
-- an entry without a block.)
--
-- ARGV     budget, keep, grace in ms, n, then n times key and bytes, then keys that the caller did not find
--
-- Replies  {{1 accepted or 0 refused, …}, {evicted keys}, {expired keys}, the index's clock}. The caller deletes the
--          blocks of both lists. A leased block may have grown: it was lost and is written again, or two processes
--          wrote it differently. It is refused and removed from the index if the difference does not fit. The entry of
--          a key that was not found is removed if it is older than the grace: another process may still be writing a
--          younger block.
--
-- Crash    after: an evicted block stays until it expires, or until a use adds it again or deletes it. The first
--          process that misses a block that was never written removes its entry.

settle()
local expired = age()
local evicted, taken = {}, {}
local mine, aside = {}, {}  -- blocks of this call, and those of them that are out of the order until its end

local function make_room(size)
  while held + size > budget and settle() > 0 do end
  if held + size > budget then return false end
  while sum + size > budget do
    local oldest = redis.call('ZPOPMIN', USED)
    if not oldest[1] then
      if settle() == 0 then return false end
    elseif mine[oldest[1]] then
      aside[oldest[1]] = oldest[2]  -- blocks behind it may be retained ones
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
  mine[key] = true
  local kept, change = redis.call('ZSCORE', HELD, key), size - size_of(key)
  if kept or change == 0 then redis.call('ZADD', kept and HELD or USED, 'GT', tick(), key) end
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
for key, score in pairs(aside) do redis.call('ZADD', USED, score, key) end

for i = last + 1, #ARGV do
  local score = redis.call('ZSCORE', USED, ARGV[i]) or redis.call('ZSCORE', HELD, ARGV[i])
  score = tonumber(score or clock)
  -- A block that is retained has been written.
  if score <= (now - ARGV[3]) * 1000 or score > clock then drop(ARGV[i]) end
end
save()
return {taken, evicted, expired, clock}
