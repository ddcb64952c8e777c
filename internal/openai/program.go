package openai

// Kind is the kind of a JSON value, as a bit so that kinds make a set.
type Kind uint8

// The kinds.
const (
	KindString Kind = 1 << iota
	KindNumber
	KindTrue
	KindFalse
	KindNull
	KindObject
	KindArray
)

// action is what a program does with a value.
type action uint8

const (
	actNone       action = iota
	actModel             // the model's name
	actBool              // remember whether it is true; arg is the bit
	actNumber            // remember a whole number ≥ 0; arg is the slot
	actText              // a string goes to the sink unescaped, an object or array as compact JSON; arg is the lane
	actString            // as actText, but only a string
	actPrompt            // an element of a prompt array: a string is text; ids, or lists of them, go as compact JSON
	actID                // an element of a list of token ids
	actID64              // a string's hash is what [IDHash] says
	actMark              // remember that it was a non-empty string, object or array; arg is the bit
	actMarkString        // as actMark, but only a string
	actMarkValue         // remember that it was anything but null or false
	actSwap              // note where a string stands in the chunk, for another to take its place
)

// rootNode is the index of the top-level object in a program; node 0 is "of no interest".
const rootNode = 1

// node says what to do with a value at one place of a document.
type node struct {
	act    action
	arg    uint8
	req    uint8 // 1 + index of the requirement that the value satisfies
	alt    bool  // it satisfies it in place of the field the requirement names
	elem   uint8 // node of an array's elements
	fields []field
	// lengths has a bit for each length of a key, modulo 32: most keys that name no field are told by it.
	lengths uint32
}

type field struct {
	key string
	to  uint8
}

// tree is how programs are written down; compile turns it into nodes.
type tree struct {
	node
	elem   *tree
	fields []branch
}

type branch struct {
	key string
	tree
}

func object(fields ...branch) tree  { return tree{fields: fields} }
func at(key string, t tree) branch  { return branch{key, t} }
func each(t tree) tree              { return tree{elem: &t} }
func do(act action, arg uint8) tree { return tree{node: node{act: act, arg: arg}} }

// with returns t that also does what act says and looks into what u describes.
func (t tree) with(u tree) tree {
	if u.elem != nil {
		t.elem = u.elem
	}
	t.fields = append(t.fields, u.fields...)
	return t
}

// compile lays t out as nodes, the root at rootNode.
func compile(t tree) []node {
	nodes := make([]node, 1, 32)
	var add func(tree) uint8
	add = func(t tree) uint8 {
		id := len(nodes)
		nodes = append(nodes, t.node)
		if t.elem != nil {
			e := add(*t.elem)
			nodes[id].elem = e
		}
		fields, lengths := make([]field, 0, len(t.fields)), uint32(0)
		for _, b := range t.fields {
			fields = append(fields, field{b.key, add(b.tree)})
			lengths |= 1 << (len(b.key) & 31)
		}
		nodes[id].fields, nodes[id].lengths = fields, lengths
		return uint8(id)
	}
	add(t)
	return nodes
}

// begin does what node id says about a value of the given kind which begins at byte i of the chunk.
func (m *machine) begin(i int, id uint8, kind Kind) {
	n := &m.prog[id]
	if n.req != 0 {
		r := n.req - 1
		switch {
		case n.alt:
			if kind != KindNull {
				m.reqAlt |= 1 << r
			}
		default: // of duplicates the last counts, as in the engines
			m.reqKind[r] = kind
			if kind&(KindString|KindObject|KindArray) != 0 {
				m.reqEmpty |= 1 << r
			}
		}
	}
	switch n.act {
	case actModel:
		m.beginModel(i, kind)
	case actBool:
		m.bools &^= 1 << n.arg
		if kind == KindTrue {
			m.bools |= 1 << n.arg
		}
	case actID64:
		if kind == KindString {
			sum := idSeed
			m.mode, m.num = modeID, int64(sum)
		}
	case actNumber:
		m.set &^= 1 << n.arg
	case actText:
		switch kind {
		case KindString:
			m.beginText(Lane(n.arg))
		case KindObject, KindArray:
			m.beginRaw(i, Lane(n.arg), m.depth, true)
		}
	case actString:
		if kind == KindString {
			m.beginText(Lane(n.arg))
		}
	case actPrompt:
		switch kind {
		case KindString:
			m.beginText(Lane(n.arg))
		case KindNumber:
			m.tokens++
			m.beginRaw(i, Lane(n.arg), m.depth-1, false)
		case KindArray:
			m.beginRaw(i, Lane(n.arg), m.depth-1, false)
		}
	case actID:
		if kind == KindNumber {
			m.tokens++
		}
	case actSwap:
		if kind == KindString {
			m.swaps, m.swapOn = append(m.swaps, Span{From: i, Begins: true}), true
		}
	case actMarkValue:
		if kind&(KindNull|KindFalse) == 0 {
			m.marks |= 1 << n.arg
		}
	}
}

// notEmpty is called when a string or container turns out to hold something.
func (m *machine) notEmpty(id uint8, kind Kind) {
	n := &m.prog[id]
	if n.req != 0 && !n.alt {
		m.reqEmpty &^= 1 << (n.req - 1)
	}
	if n.act == actMark || n.act == actMarkString && kind == KindString {
		m.marks |= 1 << n.arg
	}
}

func (m *machine) beginModel(i int, kind Kind) {
	off := m.base + int64(i)
	if m.modelSeen < 2 {
		m.modelSeen++
	}
	if m.modelSeen > 1 {
		if m.dupOff == 0 {
			m.dupOff = off
		}
		return
	}
	m.modelOff, m.modelKind = off, kind
	switch kind {
	case KindString:
		m.mode = modeModel
	case KindNull:
		m.modelLen = int32(len("null"))
	}
}

// beginText makes the string that follows routing text. Inside compact JSON it already is.
func (m *machine) beginText(lane Lane) {
	if m.rawOn {
		return
	}
	m.mode = modeText
	m.separate(lane)
}

// beginRaw sends what follows from p[i] on to the sink as compact JSON until depth is back at end.
func (m *machine) beginRaw(i int, lane Lane, end int32, inclusive bool) {
	if m.rawOn {
		return
	}
	m.separate(lane)
	m.rawOn, m.rawFrom, m.rawEnd, m.rawIncl = true, i, end, inclusive
}

var space = []byte(" ")

// separate begins a new text value in a lane: values are joined by one space.
func (m *machine) separate(lane Lane) {
	m.lane = lane
	if lane <= LanePreamble {
		m.values++
	}
	if m.text[lane] == 0 {
		return
	}
	m.text[lane]++
	if m.sink != nil {
		m.sink.Text(lane, space)
	}
}

// flushRaw sends the pending run of compact JSON that ends before p[end].
func (m *machine) flushRaw(p []byte, end int) {
	if end <= m.rawFrom {
		return
	}
	m.text[m.lane] += int64(end - m.rawFrom)
	if m.sink != nil {
		m.sink.Text(m.lane, p[m.rawFrom:end])
	}
}
