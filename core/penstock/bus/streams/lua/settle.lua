-- Publish outputs and finish deliveries in one step: all or nothing.
--
-- KEYS[1]  member   string, the token of the member's newest incarnation
-- KEYS[2]  offsets  hash, the entry up to which results are counted (`ingest/metering.py`)
-- KEYS[3]  finished hash, number of finished entries by topic (`lost.lua`)
-- KEYS[4…]          the streams of the deliveries, then those of the outputs
-- ARGV     token, ttl in ms, group, own consumer, number of deliveries, their ids, their topics, then for each output:
--          length to trim the stream to (0: do not trim), `result` if its entries are counted, `reply` if the stream is
--          a requester's (else empty), number of words, the words of the entry
--
-- Replies  {} settled; {-1} a newer incarnation has the member's name; {-2, ...} the indices (from 0) of the replies whose
--          keys are no streams; else the indices of the deliveries that another member holds. In all cases but the first
--          the script changed nothing

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
-- 2. Check that each reply's key is a stream.
local refused, at = {-2}, 6 + 2 * num
for i = 4 + num, #KEYS do
  if ARGV[at + 1] == 'reply' and redis.call('TYPE', KEYS[i]).ok ~= 'stream' then
    table.insert(refused, i - 4 - num)
  end
  at = at + 3 + tonumber(ARGV[at + 2])
end
if #refused > 1 then return refused end
-- 3. Publish. If a gateway counts results, uncounted entries are kept, up to ten times the trim length.
at = 6 + 2 * num
for i = 4 + num, #KEYS do
  local keep, words = tonumber(ARGV[at]), tonumber(ARGV[at + 2])
  local counted = ARGV[at + 1] == 'result' and redis.call('HGET', KEYS[2], 'all')
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
-- 4. Finish the deliveries: delete their messages from the streams.
for i = 1, num do
  redis.call('XACK', KEYS[3 + i], group, ARGV[5 + i])
  redis.call('HINCRBY', KEYS[3], ARGV[5 + num + i], redis.call('XDEL', KEYS[3 + i], ARGV[5 + i]))
end
redis.call('SET', KEYS[1], token, 'PX', ttl)
return {}
