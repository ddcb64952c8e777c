//go:build !shunttest

package filter

import (
	"net/http"
	"time"
)

// injecting is true in builds that can be told to fail, by the tag shunttest.
const injecting = false

const headerTest = ""

func inject(string, string) {}

func (r *Request) injectWait(time.Time, *Verdict) bool { return false }

func (r *Request) injectEvict() {}

func (r *Request) injectResume(*Verdict) bool { return false }

func injectAdmin(*Runtime, *http.ServeMux) {}
