-- Check that the keys of the index agree. The script reads the whole index: use it in tests and by hand, not on a busy
-- server.
--
-- ARGV     budget, keep
--
-- Replies  the problems found, one line each

local wrong = {}
local function say(...) wrong[#wrong + 1] = string.format(...) end

if anew then say('a part of the index was lost') end
local all, leased, count = 0, 0, 0
local sizes = redis.call('HGETALL', SIZES)
for i = 1, #sizes, 2 do
  local key, size = sizes[i], tonumber(sizes[i + 1])
  local free, kept = redis.call('ZSCORE', USED, key), redis.call('ZSCORE', HELD, key)
  if (free and 1 or 0) + (kept and 1 or 0) ~= 1 then say('a block is in %s of used and held', free and 'both' or 'none') end
  all, count = all + size, count + 1
  if kept then leased = leased + size end
  if kept then
    local last, text = 0, redis.call('HGET', LEASES, key)
    for _, over in pairs(text and cjson.decode(text) or {}) do last = math.max(last, over) end
    if last == 0 then say('a block is held without a lease') end
    if tonumber(redis.call('ZSCORE', ENDS, key) or 0) ~= last then say('a lease ends at another time than noted') end
  end
end
if all ~= sum then say('the sizes add up to %.0f, the sum says %.0f', all, sum) end
if leased ~= held then say('the leased sizes add up to %.0f, held says %.0f', leased, held) end
local apart = redis.call('ZCARD', USED) + redis.call('ZCARD', HELD)
if apart ~= count then say('%d blocks have a size, %d are used or held', count, apart) end
for _, part in ipairs({{LEASES, 'HLEN'}, {ENDS, 'ZCARD'}}) do
  if redis.call(part[2], part[1]) ~= redis.call('ZCARD', HELD) then say('%s and held differ', part[1]) end
end
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) == -1 then say('%s stays for ever', key) end
end
return wrong
