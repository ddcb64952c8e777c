package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"
)

// chat is one request of the demo.
type chat struct {
	at        time.Duration // after the start
	model     string
	stream    bool
	prompt    int // words
	maxTokens int
}

// rate is how many requests arrive in a second, on average.
const rate = 30.0

// traffic makes up n requests that arrive at random (a Poisson process), as those of many
// independent users do: two thirds for the big model, two thirds streamed, prompts of very different lengths.
func traffic(n int, seed uint64) []chat {
	rng := rand.New(rand.NewPCG(seed, 0))
	list := make([]chat, n)
	at := 0.0
	for i := range list {
		at += rng.ExpFloat64() / rate
		model := bigModel
		if rng.IntN(3) == 0 {
			model = smallModel
		}
		list[i] = chat{
			at: time.Duration(at * float64(time.Second)), model: model, stream: rng.IntN(3) > 0,
			prompt: 20 + int(rng.ExpFloat64()*150), maxTokens: 16 + rng.IntN(33),
		}
	}
	return list
}

// body is the request's JSON. No two prompts share a beginning, so that no prefix cache helps.
func (c chat) body(id int) []byte {
	text, _ := json.Marshal(map[string]any{ // can't fail
		"model": c.model, "stream": c.stream, "max_tokens": c.maxTokens,
		"messages": []map[string]string{{"role": "user", "content": fmt.Sprintf("%d: ", id) + strings.Repeat("word ", c.prompt)}},
	})
	return text
}

// outcome is what a client saw of one request.
type outcome struct {
	chat      chat
	endpoint  string        // that shunt picked
	firstByte time.Duration // of the body, from before the request was sent
	err       error         // also for a status other than 200, and a stream without its end
}

// send sends the requests at their times and returns what became of each, and the most that were open at once.
func send(ctx context.Context, addr string, list []chat) (outcomes []outcome, peak int) {
	tr := &http.Transport{MaxIdleConnsPerHost: 1000, DisableCompression: true}
	defer tr.CloseIdleConnections()
	client := &http.Client{Transport: tr, Timeout: time.Minute}
	outcomes = make([]outcome, len(list))
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		open int // under mu, like peak
	)
	begun := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i, c := range list {
		timer.Reset(time.Until(begun.Add(c.at)))
		select {
		case <-timer.C:
		case <-ctx.Done(): // those left over fail at once
		}
		wg.Go(func() {
			mu.Lock()
			open++
			peak = max(peak, open)
			mu.Unlock()
			outcomes[i] = ask(ctx, client, addr, i, c)
			mu.Lock()
			open--
			mu.Unlock()
		})
	}
	wg.Wait()
	return outcomes, peak
}

func ask(ctx context.Context, client *http.Client, addr string, id int, c chat) outcome {
	o := outcome{chat: c}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/chat/completions", strings.NewReader(string(c.body(id))))
	if err != nil {
		o.err = err
		return o
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Shunt-Explain", "1") // shunt then says in the answer which endpoint it picked
	begun := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		o.err = err
		return o
	}
	defer func() { _ = resp.Body.Close() }()
	o.endpoint = resp.Header.Get("X-Shunt-Endpoint")
	first := make([]byte, 1)
	if _, err := io.ReadFull(resp.Body, first); err != nil {
		o.err = fmt.Errorf("status %d, no body: %w", resp.StatusCode, err)
		return o
	}
	o.firstByte = time.Since(begun)
	rest, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		o.err = err
	case resp.StatusCode != http.StatusOK:
		o.err = fmt.Errorf("status %d: %s%s", resp.StatusCode, first, rest)
	case c.stream && !strings.HasSuffix(string(rest), "data: [DONE]\n\n"):
		o.err = errors.New("the stream has no end")
	}
	return o
}
