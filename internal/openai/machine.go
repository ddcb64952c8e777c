package openai

// MaxDepth is the deepest nesting a [Scan] can be told to accept: one bit of the stack per level.
const MaxDepth = 1024

// trackedDepth bounds the paths that a program can name; below it values are only checked, not interpreted.
const trackedDepth = 8

// state is where the machine stands between two bytes.
type state uint8

// States up to lastStructural skip white space.
const (
	stValue      state = iota // a value must follow
	stValueOrEnd              // just after '['
	stKey                     // after ',' in an object
	stKeyOrEnd                // just after '{'
	stColon
	stAfter        // after a value inside a container
	stEnd          // after the top-level value
	lastStructural = stEnd

	stStart   state = iota // nothing read
	stBOM1                 // after EF
	stBOM2                 // after EF BB
	stString               // inside a string
	stEscape               // after a backslash
	stHex                  // inside the four digits of \u
	stLiteral              // inside true, false, null
	stMinus                // numbers: after '-'
	stZero                 // after a leading 0
	stInt                  // in the integer part
	stDot                  // after '.'
	stFrac                 // in the fraction
	stE                    // after 'e'
	stESign                // after the exponent's sign
	stExp                  // in the exponent
	stFailed
)

// fault says why the machine stopped; the text is made in the error path only.
type fault uint8

const (
	faultNone fault = iota
	faultEmpty
	faultNotObject
	faultByte    // a byte that cannot stand here
	faultControl // a control character inside a string
	faultEscape  // a bad escape sequence
	faultDepth
	faultTrailing
	faultEnd // the body ended too early
)

// mode is what becomes of a string's bytes.
type mode uint8

const (
	modeSkip mode = iota
	modeKey
	modeText
	modeModel
	modeID
)

// machine is the resumable JSON reader under Scan and Usage. It accepts what RFC 8259 accepts, except that the
// top level must be an object, that invalid UTF-8 passes (the engine judges it), and that a leading byte order
// mark is skipped.
type machine struct {
	prog []node
	sink Sink

	base    int64 // offset of the current chunk in the body
	maxDep  int32
	depth   int32
	rawEnd  int32   // raw text ends when depth is back at this
	buf     [4]byte // a decoded rune on its way to the sink
	rawFrom int     // start of the unsent raw run in the current chunk

	state state
	mode  mode
	cur   uint8 // node of the value that follows, in objects
	val   uint8 // node of the scalar being read
	lane  Lane  // lane of the text being read

	inObject bool // the innermost open container is an object
	isKey    bool // the string being read is a key
	rawOn    bool // compact JSON is going to the sink
	rawIncl  bool // ... including the byte that closes it
	swapOn   bool // inside a string of swaps

	lit    string // rest of the literal being read
	hexN   uint8
	hexV   uint16
	high   uint16 // high surrogate waiting for its partner
	keyLen uint8
	keyBuf [maxKey]byte

	fault    fault
	faultB   byte
	faultOff int64

	strOff int64 // offset of the opening quote of the string being read
	num    int64 // value of the integer being read, -1 is not usable; or the sum of an id being read

	model     [96]byte // the model's name, unescaped
	modelN    int32
	modelLong []byte // the whole name when it does not fit
	modelOff  int64
	modelLen  int32 // raw bytes, quotes included
	modelSeen uint8
	modelKind Kind
	objEmpty  bool // nothing follows the top-level '{'
	dupOff    int64

	objStart int64 // offset just after the top-level '{'

	text   [lanes]int64
	values int32 // text values
	tokens int64 // token ids seen
	slots  [maxSlots]int64
	set    uint16 // slots that hold a number
	bools  uint8  // booleans that are true
	marks  uint8
	id     uint64 // IDHash of the last id read, 0 for none

	reqKind  [maxReqs]Kind
	reqEmpty uint8
	reqAlt   uint8

	swaps []Span // of the present chunk

	nodes [trackedDepth]uint8 // node of the container at each depth
	stack [MaxDepth / 64]uint64
	out   *[textRoom]byte // text on its way there; nil before the first
}

const (
	maxKey   = 32 // longer keys match nothing
	maxSlots = 4
	maxReqs  = 4
)

// MaxModel bounds a model's name in unescaped bytes: file system paths fit, prompts put there by mistake do not.
const MaxModel = 4096

// reset makes m ready for a new value. Only what a run reads before writing it is cleared.
func (m *machine) reset(prog []node, maxDepth int, sink Sink) {
	long := m.modelLong[:0]
	if maxDepth <= 0 || maxDepth > MaxDepth {
		maxDepth = MaxDepth
	}
	m.prog, m.sink = prog, sink
	m.base, m.maxDep, m.depth = 0, int32(maxDepth), 0
	m.state, m.mode = stStart, modeSkip
	m.cur, m.val = 0, 0
	m.inObject, m.isKey, m.rawOn, m.swapOn = false, false, false, false
	m.swaps = m.swaps[:0]
	m.high, m.keyLen = 0, 0
	m.fault, m.faultB, m.faultOff = faultNone, 0, 0
	m.modelN, m.modelLong, m.modelOff, m.modelLen = 0, long, -1, 0
	m.modelSeen, m.modelKind, m.dupOff = 0, 0, 0
	m.objStart, m.objEmpty = 0, false
	m.text, m.values, m.tokens = [lanes]int64{}, 0, 0
	m.set, m.bools, m.marks, m.id = 0, 0, 0, 0
	m.reqKind, m.reqEmpty, m.reqAlt = [maxReqs]Kind{}, 0, 0
}

func (m *machine) fail(f fault, off int, b byte) {
	m.fault, m.faultOff, m.faultB = f, m.base+int64(off), b
	m.state = stFailed
}

// write reads one chunk. After a fault the rest is only counted.
func (m *machine) write(p []byte) {
	m.rawFrom = 0
	m.swaps = m.swaps[:0]
	if m.swapOn {
		m.swaps = append(m.swaps, Span{})
	}
	i := 0
	for i < len(p) && m.state != stFailed {
		c := p[i]
		if c <= ' ' && m.state <= lastStructural {
			if c != ' ' && c != '\n' && c != '\r' && c != '\t' {
				m.unexpected(i, c)
				break
			}
			if m.rawOn {
				m.flushRaw(p, i)
				m.rawFrom = i + 1
			}
			i++
			continue
		}
		switch m.state {
		case stString:
			i = m.str(p, i)
			continue
		case stKeyOrEnd:
			if c == '}' {
				m.close(p, i, true)
				break
			}
			fallthrough
		case stKey:
			if c != '"' {
				m.unexpected(i, c)
				break
			}
			m.mode, m.isKey, m.cur, m.keyLen, m.high = modeSkip, true, 0, 0, 0
			if m.depth < trackedDepth && len(m.prog[m.nodes[m.depth]].fields) > 0 {
				m.mode = modeKey
			}
			m.state = stString
			i = m.str(p, i+1)
			continue
		case stColon:
			if c != ':' {
				m.unexpected(i, c)
				break
			}
			m.state = stValue
		case stValueOrEnd:
			if c == ']' {
				m.close(p, i, true)
				break
			}
			fallthrough
		case stValue:
			i = m.value(p, i, c)
			continue
		case stAfter:
			switch c {
			case ',':
				if m.inObject {
					m.state = stKey
				} else {
					m.state = stValue
				}
			case '}', ']':
				if (c == '}') != m.inObject {
					m.unexpected(i, c)
					break
				}
				m.close(p, i, false)
				if m.state == stAfter {
					i = m.comma(p, i+1)
					continue
				}
			default:
				m.unexpected(i, c)
			}
		case stEnd:
			m.fail(faultTrailing, i, c)
		case stStart:
			if c == 0xEF {
				m.state = stBOM1
				break
			}
			m.state = stValue
			continue
		case stBOM1, stBOM2:
			m.bom(i, c)
		case stEscape:
			m.escape(i, c)
		case stHex:
			m.hexDigit(i, c)
		case stLiteral:
			if c != m.lit[0] {
				m.unexpected(i, c)
				break
			}
			if m.lit = m.lit[1:]; m.lit == "" {
				m.state = stAfter
			}
		default:
			i = m.number(p, i)
			continue
		}
		i++
	}
	if m.rawOn {
		end := len(p)
		if m.state == stFailed { // what the sink gets must not depend on the cuts, here neither
			end, m.rawOn = int(m.faultOff-m.base), false
		}
		m.flushRaw(p, end)
	}
	if m.swapOn {
		last := &m.swaps[len(m.swaps)-1]
		last.To = len(p)
		if m.state == stFailed {
			last.To, m.swapOn = int(m.faultOff-m.base), false
		}
	}
	m.base += int64(len(p))
}

// colon and comma take the byte that most often follows a key, or a value in a container, along with it. The states
// that they skip would do the same.
func (m *machine) colon(p []byte, i int) int {
	if i < len(p) && p[i] == ':' {
		m.state = stValue
		return i + 1
	}
	return i
}

func (m *machine) comma(p []byte, i int) int {
	if i < len(p) && p[i] == ',' {
		m.state = stValue
		if m.inObject {
			m.state = stKey
		}
		return i + 1
	}
	return i
}

func (m *machine) unexpected(i int, c byte) { m.fail(faultByte, i, c) }

func (m *machine) bom(i int, c byte) {
	switch {
	case m.state == stBOM1 && c == 0xBB:
		m.state = stBOM2
	case m.state == stBOM2 && c == 0xBF:
		m.state = stValue
	default:
		m.unexpected(i, c)
	}
}

// value begins the value whose first byte is p[i] and returns where to go on.
func (m *machine) value(p []byte, i int, c byte) int {
	if m.depth == 0 && c != '{' {
		m.fail(faultNotObject, i, c)
		return i + 1
	}
	id := m.cur
	if m.depth == 0 {
		id = rootNode
	} else if !m.inObject {
		id = 0
		if m.depth < trackedDepth {
			id = m.prog[m.nodes[m.depth]].elem
		}
	}
	switch c {
	case '"':
		m.strOff, m.isKey, m.mode, m.val = m.base+int64(i), false, modeSkip, id
		if id != 0 {
			m.begin(i, id, KindString)
		}
		m.state = stString
		return m.str(p, i+1)
	case '{':
		m.open(p, i, id, KindObject)
	case '[':
		m.open(p, i, id, KindArray)
	case 't', 'f', 'n':
		return m.literal(p, i, id, c)
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		m.val, m.num = 0, 0
		if id != 0 {
			m.begin(i, id, KindNumber)
			if m.prog[id].act == actNumber {
				m.val = id
			}
		}
		switch c {
		case '-':
			m.state, m.num = stMinus, -1
		case '0':
			m.state = stZero
		default:
			m.state, m.num = stInt, int64(c-'0')
		}
		return m.number(p, i+1)
	default:
		m.unexpected(i, c)
	}
	return i + 1
}

func (m *machine) literal(p []byte, i int, id uint8, c byte) int {
	kind, lit := KindNull, "null"
	switch c {
	case 't':
		kind, lit = KindTrue, "true"
	case 'f':
		kind, lit = KindFalse, "false"
	}
	if id != 0 {
		m.begin(i, id, kind)
	}
	if len(p)-i >= len(lit) && string(p[i:i+len(lit)]) == lit {
		m.state = stAfter
		return m.comma(p, i+len(lit))
	}
	m.lit, m.state = lit[1:], stLiteral
	return i + 1
}

func (m *machine) open(p []byte, i int, id uint8, kind Kind) {
	if m.depth >= m.maxDep {
		m.fail(faultDepth, i, p[i])
		return
	}
	if id != 0 {
		m.begin(i, id, kind)
	}
	m.depth++
	if m.depth < trackedDepth {
		m.nodes[m.depth] = id
	}
	w, bit := (m.depth-1)>>6, uint64(1)<<(uint(m.depth-1)&63)
	if kind == KindObject {
		m.inObject, m.state = true, stKeyOrEnd
		m.stack[w] |= bit
		if m.depth == 1 {
			m.objStart = m.base + int64(i) + 1
		}
		return
	}
	m.inObject, m.state = false, stValueOrEnd
	m.stack[w] &^= bit
}

// close ends the innermost container, whose kind the caller has checked.
func (m *machine) close(p []byte, i int, empty bool) {
	if m.depth < trackedDepth && !empty {
		if id := m.nodes[m.depth]; id != 0 {
			m.notEmpty(id, KindObject)
		}
	}
	m.depth--
	if m.rawOn && m.depth == m.rawEnd {
		end := i
		if m.rawIncl {
			end++
		}
		m.flushRaw(p, end)
		m.rawOn = false
	}
	if m.depth == 0 {
		m.state, m.objEmpty = stEnd, empty
		return
	}
	d := uint(m.depth - 1)
	m.inObject, m.state = m.stack[d>>6]>>(d&63)&1 == 1, stAfter
}

// number goes on inside a number. A comma that ends it is taken along, another byte is left to the caller.
func (m *machine) number(p []byte, i int) int {
	for ; i < len(p); i++ {
		c := p[i]
		switch m.state {
		case stInt:
			n := m.num
			for ; c-'0' < 10; c = p[i] {
				// Past 2^53 no token count is real; the guard also keeps the sum from wrapping.
				if n >= 0 {
					if n = n*10 + int64(c-'0'); n > 1<<53 {
						n = -1
					}
				}
				if i++; i == len(p) {
					m.num = n
					return i
				}
			}
			m.num = n
			fallthrough
		case stZero:
			switch c {
			case '.':
				m.state, m.num = stDot, -1
			case 'e', 'E':
				m.state, m.num = stE, -1
			default:
				m.endNumber()
				return m.comma(p, i)
			}
		case stMinus:
			switch {
			case c == '0':
				m.state = stZero
			case c-'1' < 9:
				m.state = stInt
			default:
				m.unexpected(i, c)
				return i
			}
		case stDot:
			if c-'0' >= 10 {
				m.unexpected(i, c)
				return i
			}
			m.state = stFrac
		case stFrac:
			switch {
			case c-'0' < 10:
			case c == 'e' || c == 'E':
				m.state = stE
			default:
				m.endNumber()
				return m.comma(p, i)
			}
		case stE:
			if c == '+' || c == '-' {
				m.state = stESign
				continue
			}
			fallthrough
		case stESign:
			if c-'0' >= 10 {
				m.unexpected(i, c)
				return i
			}
			m.state = stExp
		default: // stExp
			if c-'0' >= 10 {
				m.endNumber()
				return m.comma(p, i)
			}
		}
	}
	return i
}

func (m *machine) endNumber() {
	m.state = stAfter
	if m.val == 0 || m.num < 0 {
		return
	}
	slot := m.prog[m.val].arg
	m.slots[slot], m.set = m.num, m.set|1<<slot
}

// end tells the machine that nothing follows.
func (m *machine) end() {
	switch m.state {
	case stEnd, stFailed:
	case stStart:
		m.fail(faultEmpty, 0, 0)
	case stValue:
		if m.depth == 0 {
			m.fail(faultEmpty, 0, 0)
			return
		}
		fallthrough
	default:
		m.fail(faultEnd, 0, 0)
	}
}
