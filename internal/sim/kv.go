package sim

// kvCache is a paged KV cache with prefix sharing, as vLLM's block pool: one list holds every block that no
// sequence uses, least recently used first; a block keeps its content hash until it is taken for something else, so
// a free block is also a cached one. Not safe for concurrent use.
type kvCache struct {
	blocks []kvBlock
	byHash map[uint64]int32
	head   int32 // next to be taken or evicted; -1 when empty
	tail   int32
	free   int // length of the list
}

type kvBlock struct {
	hash       uint64
	hashed     bool // hash is valid and byHash leads here
	ref        int32
	prev, next int32
}

func newKVCache(blocks int) *kvCache {
	c := &kvCache{blocks: make([]kvBlock, blocks), byHash: make(map[uint64]int32), head: -1, tail: -1}
	for i := range c.blocks {
		c.pushTail(int32(i))
	}
	return c
}

func (c *kvCache) pushTail(id int32) {
	b := &c.blocks[id]
	b.prev, b.next = c.tail, -1
	if c.tail >= 0 {
		c.blocks[c.tail].next = id
	} else {
		c.head = id
	}
	c.tail = id
	c.free++
}

func (c *kvCache) unlink(id int32) {
	b := &c.blocks[id]
	if b.prev >= 0 {
		c.blocks[b.prev].next = b.next
	} else {
		c.head = b.next
	}
	if b.next >= 0 {
		c.blocks[b.next].prev = b.prev
	} else {
		c.tail = b.prev
	}
	c.free--
}

// prefix appends the blocks that hold the longest cached prefix of hashes and says how many of them are on the free
// list: taking those costs free blocks too.
func (c *kvCache) prefix(hashes []uint64, ids []int32) (hit []int32, idle int) {
	for _, h := range hashes {
		id, ok := c.byHash[h]
		if !ok {
			break
		}
		if c.blocks[id].ref == 0 {
			idle++
		}
		ids = append(ids, id)
	}
	return ids, idle
}

// share takes one more reference to a cached block.
func (c *kvCache) share(id int32) {
	if c.blocks[id].ref == 0 {
		c.unlink(id)
	}
	c.blocks[id].ref++
}

// take hands out the least recently used free block and forgets what it cached. The caller checks free first.
func (c *kvCache) take() int32 {
	id := c.head
	c.unlink(id)
	b := &c.blocks[id]
	if b.hashed {
		delete(c.byHash, b.hash)
		b.hashed = false
	}
	b.ref = 1
	return id
}

// publish names the content of a full block, so that others find it. Of two blocks with the same content the first
// stays the cached one.
func (c *kvCache) publish(id int32, hash uint64) {
	b := &c.blocks[id]
	if b.hashed {
		return
	}
	if _, dup := c.byHash[hash]; dup {
		return
	}
	b.hash, b.hashed = hash, true
	c.byHash[hash] = id
}

// release gives a sequence's references back, last block first: the end of a chain is of use to fewer prompts than
// its beginning, so it is evicted first.
func (c *kvCache) release(ids []int32) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := &c.blocks[ids[i]]
		b.ref--
		if b.ref == 0 {
			c.pushTail(ids[i])
		}
	}
}

// clear forgets every cached prefix; blocks in use stay in use.
func (c *kvCache) clear() {
	for i := range c.blocks {
		c.blocks[i].hashed = false
	}
	clear(c.byHash)
}
