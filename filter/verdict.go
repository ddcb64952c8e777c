package filter

import (
	"math/bits"
	"slices"

	"github.com/shuntproxy/shunt/internal/openai"
)

// Action is what a door does with a request after a call into the core.
type Action uint8

// The actions.
const (
	// Continue sends the request on.
	Continue Action = iota
	// NeedBody holds the headers and asks for the whole body, up to
	// Verdict.BodyLimit bytes.
	NeedBody
	// Wait holds the request until Host.Post has led to Request.Resume.
	Wait
	// Reply ends the request with Verdict.Reply.
	Reply
)

// Verdict is an answer to a door: what to change and what to do. A door applies
// it in the order of the fields. It is reused; Reset keeps the capacity.
type Verdict struct {
	Action Action
	// BodyLimit comes with NeedBody, in bytes.
	BodyLimit int64
	// BodyRoom comes with NeedBody: a door that can asks Request.More before it
	// holds more bytes than that. 0 is no bound but BodyLimit.
	BodyRoom int64
	// Remove lists request headers (or trailers) to remove, all of each name.
	Remove []string
	// Set lists request headers to set, in place of all of each name.
	Set []Header
	// Body, where its With is not nil, changes the request's body.
	Body openai.Edit
	// Destination, if set, replaces the header HeaderDestination and the string
	// of that key in the dynamic metadata namespace MetadataLB: an ip:port, or
	// several with commas, the picked one first.
	Destination string
	// Metadata goes to the dynamic metadata namespace MetadataShunt, before a
	// reply.
	Metadata []Field
	// Watch asks for Request.Response at the response's headers; after that and
	// Request.ResponseBody, for ResponseBody with the next pieces.
	Watch bool
	// Edits change a piece of the response's body, in ascending order. Name is
	// the raw text that they put in.
	Edits []Edit
	Name  string
	// ResponseHeaders are added to the response when it comes.
	ResponseHeaders []Header
	// Reply comes with the action Reply.
	Reply LocalReply
}

// Field is one value of dynamic metadata: Number where Text is empty.
type Field struct {
	Key    string
	Text   string
	Number float64
}

// Header is one header of a reply.
type Header struct{ Key, Value string }

// LocalReply is an answer of shunt's own.
type LocalReply struct {
	Status int
	// GRPC, if not 0, asks for a trailers-only reply with this grpc-status and
	// Message, without body.
	GRPC    int
	Message string
	Headers []Header
	Body    []byte
	// Details becomes response_code_details.
	Details string
}

// Reset makes a Verdict ready for the next call.
func (v *Verdict) Reset() {
	*v = Verdict{
		Remove: v.Remove[:0], Set: v.Set[:0], Metadata: v.Metadata[:0], Edits: v.Edits[:0], ResponseHeaders: v.ResponseHeaders[:0],
		Reply: LocalReply{Headers: v.Reply.Headers[:0], Body: v.Reply.Body[:0]},
	}
}

// unchange takes back what was to change in a request that is not sent.
func (v *Verdict) unchange() { v.Set, v.Body = v.Set[:0], openai.Edit{} }

func (v *Verdict) set(key, value string) { v.Set = append(v.Set, Header{key, value}) }

func (v *Verdict) text(key, value string) {
	if value != "" {
		v.Metadata = append(v.Metadata, Field{Key: key, Text: value})
	}
}

func (v *Verdict) has(key string) bool {
	return slices.ContainsFunc(v.Metadata, func(f Field) bool { return f.Key == key })
}

func (v *Verdict) number(key string, value float64) {
	v.Metadata = append(v.Metadata, Field{Key: key, Number: value})
}

func lowestBit(x uint32) int { return bits.TrailingZeros32(x) }
