package filter

import (
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// codeUnknownPath is the error code of a path that the configuration refuses.
const codeUnknownPath = "unknown_path"

// lookup finds the endpoint that a request is for. The body of a tunnel never
// ends, so none is read there.
func (r *Request) lookup(h *Head) (id string) {
	r.rules, id = openai.Lookup(h.Method, h.Path, r.set.cfg.Paths.Prefixes)
	if h.Tunnel && r.rules != nil && r.rules.From != openai.FromQuery {
		r.rules = nil
	}
	return id
}

// readsBody reports whether the request's body says what it is for.
func (r *Request) readsBody() bool {
	return r.rules != nil && (r.rules.From == openai.FromBody || r.rules.From == openai.FromForm)
}

// byHeaders decides a request whose body is not read: nothing in it would
// change the pick.
func (r *Request) byHeaders(h *Head, id string, now time.Time, v *Verdict) {
	r.size = max(0, h.ContentLength) // what is held if it waits
	leastRequest := true
	switch {
	case r.rules == nil:
		if r.set.cfg.Paths.Unknown == config.UnknownReject && !openai.Known(h.Path, r.set.cfg.Paths.Prefixes) {
			r.refuse(404, codeUnknownPath, "no such path: "+h.Method+" "+quote(pathOnly(h.Path)), "", v)
			return
		}
	case r.rules.From == openai.FromQuery:
		if !r.readRewrite(h, v) {
			return
		}
		leastRequest = !r.modelFromQuery(h, v)
	case r.rules.From == openai.FromStore:
		r.follow(responseID(id))
	case r.rules.From == openai.FromPool:
		if !r.set.cfg.Models.List {
			r.rules = nil
			break
		}
		if id != "" {
			r.identity.wish().id = strings.Clone(id)
		}
	}
	if leastRequest {
		r.policy = scorer.LeastRequest()
	}
	r.decide(now, v)
}

func pathOnly(path string) string {
	path, _, _ = strings.Cut(path, "?")
	return path
}

// modelFromQuery takes the model of a session from its path, and reports
// whether there is one. Where it is rewritten, so is the path.
func (r *Request) modelFromQuery(h *Head, v *Verdict) bool {
	asked, from, to := openai.Query(h.Path, "model")
	header, rewriter := r.identity.wishes().rewrite, r.rewriter()
	if asked == "" && !rewriter.supplies(header) {
		return false
	}
	if r.setModels(r.pool.holder.Load(), rewriter, asked, header, rand.Uint64()) {
		target := url.QueryEscape(r.model)
		switch {
		case asked != "":
			v.set(":path", h.Path[:from]+target+h.Path[to:])
		case strings.Contains(h.Path, "?"):
			v.set(":path", h.Path+"&model="+target)
		default:
			v.set(":path", h.Path+"?model="+target)
		}
	}
	return true
}

// answerModels answers which models there are from the snapshot, or waits for
// a pool that is still starting. It reports false where that is not known: then
// an engine says.
func (r *Request) answerModels(snap *pool.Snapshot, now time.Time, v *Verdict) bool {
	if r.starting(snap, now) {
		r.noCandidates(snap, nil, now, v)
		return true
	}
	names := r.modelNames(snap)
	if len(names) == 0 && !(snap.Complete && len(snap.Endpoints) == 0) {
		return false // they serve any model, and list none
	}
	id := r.identity.wishes().id
	if id == "" {
		r.serve(openai.AppendModels(v.Reply.Body, names, r.pool.started.Unix()), v)
		return true
	}
	if !slices.Contains(names, id) {
		r.refuse(404, codeModelNotFound, "model "+quote(id)+" does not exist", "model", v)
		return true
	}
	r.serve(openai.AppendModel(v.Reply.Body, id, r.pool.started.Unix()), v)
	return true
}

// modelNames are the models that a request to this pool may ask for, sorted.
func (r *Request) modelNames(snap *pool.Snapshot) []string {
	names := snap.ModelNames()
	for i := range r.set.cfg.Models.Known {
		known := &r.set.cfg.Models.Known[i]
		names = append(append(names, known.Name), known.Adapters...)
	}
	names = slices.AppendSeq(names, r.rewriter().names)
	slices.Sort(names)
	return slices.Compact(names)
}
