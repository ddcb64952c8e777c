package sim

import (
	"slices"
	"strings"
	"time"
)

// LoraSeries is one combination of adapters that was seen, and when last.
type LoraSeries struct {
	Running, Waiting string // comma-separated
	At               time.Duration
}

func (m *Model) countLora(set map[string]int, s *Seq, d int) {
	if s.Adapter == "" {
		return
	}
	n := set[s.Adapter] + d
	switch {
	case n == 0:
		delete(set, s.Adapter)
		m.loraChanged = true
	case n == d:
		m.loraChanged = true
	}
	if n > 0 {
		set[s.Adapter] = n
	}
}

// noteLora stamps the present combination of adapters; old ones stay for ever, as in vLLM.
func (m *Model) noteLora(at time.Duration) {
	if m.loraChanged {
		m.loraChanged = false
		names := func(set map[string]int, more []string) string {
			all := slices.Clone(more)
			for a := range set {
				if !slices.Contains(all, a) {
					all = append(all, a)
				}
			}
			slices.Sort(all)
			return strings.Join(all, ",")
		}
		run, wait := names(m.runningLora, m.load.RunningAdapters), names(m.waitingLora, m.load.WaitingAdapters)
		m.loraNow = slices.IndexFunc(m.lora, func(l LoraSeries) bool { return l.Running == run && l.Waiting == wait })
		if m.loraNow < 0 {
			m.loraNow = len(m.lora)
			m.lora = append(m.lora, LoraSeries{Running: run, Waiting: wait})
		}
	}
	if m.loraNow >= 0 {
		m.lora[m.loraNow].At = at
	}
}
