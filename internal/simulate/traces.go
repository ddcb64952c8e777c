package simulate

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Formats are the formats of traces that ReadTrace knows.
func Formats() []string { return []string{"mooncake", "azure", "burstgpt"} }

// maxTokens bounds a trace's prompts and outputs.
const maxTokens = 16 << 20

// ReadTrace reads a trace in one of the Formats, compressed with gzip or not, in
// any order of time. Its first request arrives at 0. Empty lines and a byte order
// mark are skipped. Lines with a prompt or an output of no tokens are failed requests, left out and
// counted.
func ReadTrace(r io.Reader, format string) (*Workload, error) {
	w := &Workload{Name: format}
	r, err := unpacked(r)
	if err != nil {
		return nil, err
	}
	switch format {
	case "mooncake":
		err = w.readMooncake(r)
	case "azure":
		err = w.readCSV(r, []string{"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, azureTime)
	case "burstgpt":
		err = w.readCSV(r, []string{"Timestamp", "Request tokens", "Response tokens"}, secondsTime)
	default:
		return nil, fmt.Errorf("unknown trace format %q, valid: %s", format, strings.Join(Formats(), ", "))
	}
	if err != nil {
		return nil, err
	}
	if len(w.Requests) == 0 {
		return nil, errors.New("the trace has no request")
	}
	sortRequests(w.Requests)
	start := w.Requests[0].At
	for i := range w.Requests {
		w.Requests[i].At -= start
	}
	return w, nil
}

// unpacked returns what a file says that may be compressed, without a byte order
// mark.
func unpacked(r io.Reader) (io.Reader, error) {
	in := bufio.NewReader(r)
	if head, _ := in.Peek(2); bytes.Equal(head, []byte{0x1f, 0x8b}) {
		out, err := gzip.NewReader(in)
		if err != nil {
			return nil, err
		}
		in = bufio.NewReader(out)
	}
	if head, _ := in.Peek(3); string(head) == "\ufeff" {
		_, _ = in.Discard(len(head)) // they are there
	}
	return in, nil
}

// mooncakeBlock is the tokens of one hash id.
const mooncakeBlock = 512

// readMooncake reads lines such as {"timestamp": 0, "input_length": 6758,
// "output_length": 500, "hash_ids": [0, 1, 2]}: milliseconds, tokens, and an id
// for each 512 tokens of the prompt, the last perhaps for less.
func (w *Workload) readMooncake(r io.Reader) error {
	const wanted = "an object with timestamp, input_length and output_length (whole numbers) is wanted"
	in := bufio.NewScanner(r)
	in.Buffer(nil, 16<<20)
	for n := 1; in.Scan(); n++ {
		if len(strings.TrimSpace(in.Text())) == 0 {
			continue
		}
		var line struct {
			Timestamp *float64 `json:"timestamp"`
			Input     *int     `json:"input_length"`
			Output    *int     `json:"output_length"`
			IDs       []int64  `json:"hash_ids"`
		}
		if err := json.Unmarshal(in.Bytes(), &line); err != nil {
			return fmt.Errorf("line %d: %s: %w", n, wanted, err)
		}
		if line.Timestamp == nil || line.Input == nil || line.Output == nil {
			return fmt.Errorf("line %d: %s", n, wanted)
		}
		req := Request{At: time.Duration(*line.Timestamp * float64(time.Millisecond)), Prompt: *line.Input, Output: *line.Output}
		if err := checkLine(&req, *line.Timestamp); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if req.Prompt == 0 || req.Output == 0 {
			w.Dropped++
			continue
		}
		blocks := req.Prompt / BlockTokens
		req.Blocks = make([]uint64, 0, blocks)
		for _, id := range line.IDs {
			if k := min(mooncakeBlock/BlockTokens, blocks-len(req.Blocks)); k > 0 {
				req.Blocks = chain(req.Blocks, uint64(id)+1, k)
			}
		}
		w.unique(&req, blocks)
		w.Requests = append(w.Requests, req)
	}
	return in.Err()
}

// unique fills up a request's blocks with content that no other has.
func (w *Workload) unique(r *Request, blocks int) {
	if len(r.Blocks) < blocks {
		r.Blocks = chain(r.Blocks, mix(uint64(len(w.Requests))+1)|1<<63, blocks-len(r.Blocks))
	}
}

func checkLine(r *Request, at float64) error {
	if r.Prompt < 0 || r.Output < 0 || r.Prompt > maxTokens || r.Output > maxTokens {
		return fmt.Errorf("%d and %d tokens: 0 to %d are wanted", r.Prompt, r.Output, maxTokens)
	}
	if !(math.Abs(at) < 1e12) {
		return fmt.Errorf("time %v is out of range", at)
	}
	return nil
}

// readCSV reads a table with a header; columns are those of time, prompt and
// output. Such traces say nothing of content: no two prompts share any.
func (w *Workload) readCSV(r io.Reader, columns []string, parse func(string) (time.Duration, error)) error {
	in := csv.NewReader(r)
	in.FieldsPerRecord = -1
	wanted := `"` + strings.Join(columns, `", "`) + `"`
	header, err := in.Read()
	switch {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("is empty: a header with the columns %s is wanted, then a line for each request", wanted)
	case err != nil:
		return fmt.Errorf("is no CSV with the columns %s: %w", wanted, err)
	}
	var at [3]int
	for i, name := range columns {
		at[i] = slices.IndexFunc(header, func(h string) bool {
			return strings.EqualFold(strings.TrimSpace(h), name)
		})
		if at[i] < 0 {
			return fmt.Errorf("the header has no column %q: %s are wanted", name, wanted)
		}
	}
	for {
		line, err := in.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		n, _ := in.FieldPos(0)
		if len(line) <= slices.Max(at[:]) {
			return fmt.Errorf("line %d: has %d columns, and the header %d", n, len(line), len(header))
		}
		var req Request
		var err1, err2, err3 error
		req.At, err1 = parse(strings.TrimSpace(line[at[0]]))
		req.Prompt, err2 = tokenCount(columns[1], line[at[1]])
		req.Output, err3 = tokenCount(columns[2], line[at[2]])
		if err := errors.Join(err1, err2, err3); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if err := checkLine(&req, 0); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if req.Prompt == 0 || req.Output == 0 {
			w.Dropped++
			continue
		}
		w.unique(&req, req.Prompt/BlockTokens)
		w.Requests = append(w.Requests, req)
	}
}

func tokenCount(column, text string) (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		return 0, fmt.Errorf("%s: %q is not a whole number of tokens", column, text)
	}
	return n, nil
}

// azureTime reads 2023-11-16 18:17:03.9799600, and the same with an offset.
func azureTime(s string) (time.Duration, error) {
	for _, layout := range []string{"2006-01-02 15:04:05", "2006-01-02 15:04:05Z07:00", "2006-01-02T15:04:05", time.RFC3339} {
		if t, err := time.Parse(layout, s); err == nil && t.Year() >= 1970 && t.Year() < 2200 {
			return time.Duration(t.UnixNano()), nil
		}
	}
	return 0, fmt.Errorf("%q is no time such as 2023-11-16 18:17:03.9799600", s)
}

func secondsTime(s string) (time.Duration, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(math.Abs(v) < 1e9) {
		return 0, fmt.Errorf("%q is no number of seconds", s)
	}
	return time.Duration(v * float64(time.Second)), nil
}
