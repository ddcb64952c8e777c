package filter

import (
	"errors"
	"mime"
	"slices"
	"strings"

	"github.com/shuntproxy/shunt/internal/openai"
)

const (
	codeInvalidValue        = string(openai.CodeInvalidValue)
	codeUnsupportedEncoding = string(openai.CodeUnsupportedEncoding)
)

// openBody looks at what the headers say about the body, and refuses one that
// can't be read.
func (r *Request) openBody(h *Head, v *Verdict) bool {
	r.sized = h.ContentLength >= 0
	if h.ContentEncoding != "" {
		encoding, ok := openai.ParseEncoding(h.ContentEncoding)
		if !ok {
			v.Reply.Headers = append(v.Reply.Headers, Header{"accept-encoding", "gzip, zstd"})
			r.refuse(415, codeUnsupportedEncoding, "content-encoding "+quote(h.ContentEncoding)+" can't be read: send gzip, zstd or none", "", v)
			return false
		}
		if encoding != openai.Identity {
			r.identity.wish().encoding = encoding
		}
	}
	if r.rules.From == openai.FromForm {
		boundary := openai.Boundary(h.ContentType)
		if boundary == "" {
			r.refuse(400, codeInvalidValue, "the request body must be a form: content-type multipart/form-data with a boundary, in UTF-8", "", v)
			return false
		}
		r.identity.wish().boundary = strings.Clone(boundary)
		return true
	}
	if !readable(h.ContentType) {
		r.refuse(415, codeUnsupportedEncoding, "content-type "+quote(h.ContentType)+" can't be read: send JSON in UTF-8", "", v)
		return false
	}
	return true
}

// readable reports whether a body of that content type can be read as JSON.
// Engines and clients care little for the type, so only what is sure to be
// something else is refused: a form, or a character set in which ASCII is not
// ASCII.
func readable(contentType string) bool {
	switch contentType {
	case "", "application/json", "application/json; charset=utf-8":
		return true
	}
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		return true
	}
	charset := strings.ToLower(params["charset"])
	return kind != "multipart/form-data" && !strings.HasPrefix(charset, "utf-16") && !strings.HasPrefix(charset, "utf-32") &&
		!strings.HasPrefix(charset, "ucs-")
}

// bodyScanner reads a body piece by piece: JSON or a form.
type bodyScanner interface {
	Write(piece []byte)
	Finish() (openai.Result, *openai.Error)
}

// readBody reads a body of r.size bytes. decoded is the whole of it where it was
// compressed and may have to be rewritten. It reports false after an answer.
func (r *Request) readBody(body *bodyReader, chunks [][]byte, rewriter *rewriter, v *Verdict) (result openai.Result, decoded []byte, ok bool) {
	wish := r.identity.wishes()
	options := r.set.scan
	options.ModelOptional = rewriter.supplies(wish.rewrite)
	for _, c := range chunks {
		r.size += int64(len(c))
	}
	body.reset(r, options)
	var to bodyScanner = &body.scan
	if wish.boundary != "" {
		form := new(openai.Form)
		form.Reset(wish.boundary, options)
		to = form
	}
	if wish.encoding == openai.Identity {
		for _, c := range chunks {
			to.Write(c)
		}
	} else if decoded, ok = r.decode(to, chunks, rewriter.mayRewrite(wish.rewrite), v); !ok {
		return result, nil, false
	}
	result, fault := to.Finish()
	if fault != nil {
		r.refuse(400, string(fault.Code), fault.Message, fault.Param, v)
		return result, nil, false
	}
	return result, decoded, true
}

// decode hands a compressed body to a scanner, decoded. With keep it returns what
// was decoded: it may be needed once more.
func (r *Request) decode(to bodyScanner, chunks [][]byte, keep bool, v *Verdict) (decoded []byte, ok bool) {
	wish := r.identity.wishes()
	err := openai.Decode(wish.encoding, slices.Clone(chunks), int64(r.set.cfg.Limits.RequestBody), func(piece []byte) {
		to.Write(piece)
		if keep {
			decoded = append(decoded, piece...)
		}
	})
	switch {
	case errors.Is(err, openai.ErrTooLarge):
		r.refuse(413, codeTooLarge, "the decoded request body is over the limit of "+r.set.cfg.Limits.RequestBody.String()+
			" (limits.requestBody)", "", v)
	case err != nil:
		r.refuse(400, codeInvalidValue, "the request body is not valid "+wish.encoding.String()+": "+err.Error(), "", v)
	default:
		return decoded, true
	}
	return nil, false
}

// editModel makes the body ask for the model that the engine gets: only the
// bytes of the value change. A compressed body is sent decoded.
func (r *Request) editModel(result *openai.Result, decoded []byte, v *Verdict) {
	e := result.ModelEdit(r.model)
	if decoded != nil {
		e = openai.Edit{Length: r.size, With: slices.Concat(decoded[:e.Offset], e.With, decoded[e.Offset+e.Length:])}
		v.Remove = append(v.Remove, "content-encoding")
	}
	v.Body = e
	if r.sized {
		v.set("content-length", e.LengthOf(r.size))
	}
}
