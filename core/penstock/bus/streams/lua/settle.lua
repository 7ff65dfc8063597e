-- Publish outputs and finish deliveries in one step: all or nothing.
--
-- KEYS[1]  member   string, the token of the member's newest incarnation
-- KEYS[2]  offsets  hash, the entry up to which results are counted (`ingest/metering.py`)
-- KEYS[3]  finished hash, number of finished entries by topic (`lost.lua`)
-- KEYS[4…]          the streams of the deliveries, then those of the outputs
-- ARGV     token, ttl in ms, group, own consumer, number of deliveries, their ids, their topics, then for each output:
--          length to trim the stream to (0: do not trim), 1 if its entries are counted, number of words, the words of
--          the entry
--
-- Replies  {} settled; {-1} a newer incarnation has the member's name; else the indices (from 0) of the deliveries that
--          another member holds. In the last two cases the script changed nothing

local token, ttl, group, me, num = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
-- 1. Check that this incarnation still has the member's name and holds all deliveries.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= token then return {-1} end
local lost = {}
for i = 1, num do
  local id = ARGV[5 + i]
  if #redis.call('XPENDING', KEYS[3 + i], group, id, id, 1, me) == 0 then table.insert(lost, i - 1) end
end
if #lost > 0 then return lost end
-- 2. Publish. If a gateway counts results, uncounted entries are kept, up to ten times the trim length.
local at = 6 + 2 * num
for i = 4 + num, #KEYS do
  local keep, words = tonumber(ARGV[at]), tonumber(ARGV[at + 2])
  local counted = ARGV[at + 1] == '1' and redis.call('HGET', KEYS[2], 'all')
  local entry = {unpack(ARGV, at + 3, at + 2 + words)}
  if keep == 0 then
    redis.call('XADD', KEYS[i], '*', unpack(entry))
  else
    redis.call('XADD', KEYS[i], 'MAXLEN', '~', counted and 10 * keep or keep, '*', unpack(entry))
    local over = redis.call('XLEN', KEYS[i]) - keep
    if counted and over > 0 then redis.call('XTRIM', KEYS[i], 'MINID', '~', counted, 'LIMIT', over) end
  end
  at = at + 3 + words
end
-- 3. Finish the deliveries: delete their messages from the streams.
for i = 1, num do
  redis.call('XACK', KEYS[3 + i], group, ARGV[5 + i])
  redis.call('HINCRBY', KEYS[3], ARGV[5 + num + i], redis.call('XDEL', KEYS[3 + i], ARGV[5 + i]))
end
redis.call('SET', KEYS[1], token, 'PX', ttl)
return {}
