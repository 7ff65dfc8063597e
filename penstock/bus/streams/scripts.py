"""The Lua scripts of `StreamsBus`. All keys of a pipeline share a hash slot.

A member's key holds the token of its newest incarnation; its consumer in the groups is called
`<name>/<token>`. So an incarnation that was replaced, or went silent, is known by its consumer's name, and
its deliveries can be taken over.
"""

BEAT = """
-- Say that the member lives. KEYS: 1 member key. ARGV: 1 token, 2 ttl in ms.
-- Returns 1, or 0 if a newer incarnation has its place.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

LEAVE = """
-- Leave: from now on others may take the deliveries. KEYS: 1 member key. ARGV: 1 token.
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""

RECLAIM = """
-- Take over what members hold that are gone. KEYS: the group's streams. It also reads the members' keys.
-- ARGV: 1 group, 2 own consumer, 3 what member keys begin with, then for each stream how many may be taken.
-- Returns for each stream the entries taken.
local group, me, prefix = ARGV[1], ARGV[2], ARGV[3]
local taken = {}
for i, stream in ipairs(KEYS) do
  local room = tonumber(ARGV[3 + i])
  taken[i] = {}
  for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local info = {}
    for j = 1, #flat, 2 do info[flat[j]] = flat[j + 1] end
    local name, token = string.match(info.name, '^(.*)/([^/]*)$')
    if info.name ~= me and name and redis.call('GET', prefix .. name) ~= token then
      if info.pending == 0 then
        redis.call('XGROUP', 'DELCONSUMER', stream, group, info.name)
      elseif room > 0 then
        local ids = {}
        for _, row in ipairs(redis.call('XPENDING', stream, group, '-', '+', room, info.name)) do
          table.insert(ids, row[1])
        end
        for _, entry in ipairs(redis.call('XCLAIM', stream, group, me, 0, unpack(ids))) do
          if entry then
            table.insert(taken[i], entry)
            room = room - 1
          end
        end
      end
    end
  end
end
return taken
"""

SETTLE = """
-- Publish outputs and finish deliveries, together.
-- KEYS: 1 member key, 2 how far results are counted (`ingest/metering.py`), the streams of the deliveries, then
-- those of the outputs.
-- ARGV: 1 token, 2 ttl in ms, 3 group, 4 own consumer, 5 number of deliveries, their ids, then for each output:
-- length to trim the stream to (0: never), 1 if its entries are counted, number of words, the words of the entry.
-- Returns {} when done; {-1} if a newer incarnation has the member's place; else the indices (from 0) of
-- deliveries that are not this member's, and nothing was done.
local token, ttl, group, me, num = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
-- 1. Is this still the member, and are the deliveries its own?
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= token then return {-1} end
local lost = {}
for i = 1, num do
  local id = ARGV[5 + i]
  if #redis.call('XPENDING', KEYS[2 + i], group, id, id, 1, me) == 0 then table.insert(lost, i - 1) end
end
if #lost > 0 then return lost end
-- 2. Publish. Where somebody counts, what is not counted yet is kept, up to ten times as much.
local at = 6 + num
for i = 3 + num, #KEYS do
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
-- 3. Finish. A message leaves its stream here.
for i = 1, num do
  redis.call('XACK', KEYS[2 + i], group, ARGV[5 + i])
  redis.call('XDEL', KEYS[2 + i], ARGV[5 + i])
end
redis.call('SET', KEYS[1], token, 'PX', ttl)
return {}
"""

MOVE = """
-- Move one entry from a stream to another, once. KEYS: 1 from, 2 to. ARGV: 1 its id, 2... the words of the entry.
-- Returns 1, or 0 if it is not there any more.
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
return 1
"""
