package pool

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParseTarget(t *testing.T) {
	for _, c := range []struct {
		address    string
		labels     map[string]string
		want       string // address
		metricPort uint16
		engine     Engine
		problems   []string // each a prefix
	}{
		{address: "10.0.0.1", want: "10.0.0.1:8000", metricPort: 8000, engine: EngineVLLM},
		{address: "10.0.0.1:9000", want: "10.0.0.1:9000", metricPort: 8000, engine: EngineVLLM},
		{address: "fd00::1", want: "[fd00::1]:8000", metricPort: 8000, engine: EngineVLLM},
		{address: "[fd00::1]", want: "[fd00::1]:8000", metricPort: 8000, engine: EngineVLLM},
		{address: "[fd00::1]:9000", want: "[fd00::1]:9000", metricPort: 8000, engine: EngineVLLM},
		{address: "::ffff:10.0.0.1", want: "10.0.0.1:8000", metricPort: 8000, engine: EngineVLLM},
		{address: "[::ffff:10.0.0.1]:9000", want: "10.0.0.1:9000", metricPort: 8000, engine: EngineVLLM},
		{address: "10.0.0.1", labels: map[string]string{LabelPort: "9000"}, want: "10.0.0.1:9000", metricPort: 8000, engine: EngineVLLM},
		{address: "10.0.0.1:9000", labels: map[string]string{LabelPort: "9000"}, want: "10.0.0.1:9000", metricPort: 8000, engine: EngineVLLM},
		{address: "10.0.0.1:9000", labels: map[string]string{LabelMetricPort: "9001", LabelEngine: "SGLang "}, want: "10.0.0.1:9000", metricPort: 9001, engine: EngineSGLang},
		{address: "10.0.0.1", labels: map[string]string{LabelEngine: "trtllm-serve"}, want: "10.0.0.1:8000", metricPort: 8000, engine: EngineTRTLLM},
		{address: "10.0.0.1", labels: map[string]string{LabelEngine: "xllm"}, want: "10.0.0.1:8000", metricPort: 8000, engine: EngineXLLM},

		{address: "", problems: []string{"address: is missing"}},
		{address: "engine-1", problems: []string{`address: "engine-1" is not an IP (names go under dns)`}},
		{address: "engine-1:8000", problems: []string{`address: "engine-1" is not an IP (names go under dns)`}},
		{address: "http://10.0.0.1", problems: []string{"address: "}},
		{address: "10.0.0.1:0", problems: []string{"address: \"10.0.0.1:0\" has port 0"}},
		{address: "10.0.0.1:70000", problems: []string{`address: "70000" is not a port`}},
		{address: "10.0.0.1:", problems: []string{`address: "" is not a port`}},
		{address: "1:2:3:4:5:6:7:8:9000", problems: []string{`address: "1:2:3:4:5:6:7:8:9000" is not IP:port; write [1:2:3:4:5:6:7:8]:9000`}},
		{address: ":::1", problems: []string{`address: ":::1" is not IP:port; write [::]:1`}},
		{address: "[10.0.0.1]:9000", problems: []string{`address: "[10.0.0.1]:9000" is not IP:port; write 10.0.0.1:9000`}},
		{address: "[fd00::1", problems: []string{`address: "[fd00:" is not an IP`}},
		{address: "0.0.0.0", problems: []string{"address: "}},
		{address: "::", problems: []string{"address: "}},
		{address: "fe80::1%eth0", problems: []string{"address: "}},
		{address: "10.0.0.1", labels: map[string]string{LabelPort: "x"}, problems: []string{`labels["model.aibrix.ai/port"]: "x" is not a port`}},
		{address: "10.0.0.1:1", labels: map[string]string{LabelPort: "2"}, problems: []string{`labels["model.aibrix.ai/port"]: 2 differs from the port in address`}},
		{address: "10.0.0.1", labels: map[string]string{LabelMetricPort: "-1"}, problems: []string{`labels["model.aibrix.ai/metric-port"]: `}},
		{address: "10.0.0.1", labels: map[string]string{LabelEngine: "ollama"}, problems: []string{`labels["model.aibrix.ai/engine"]: unknown engine "ollama", valid: vllm, sglang, trtllm, xllm`}},
		{address: "a", labels: map[string]string{LabelPort: "x", LabelMetricPort: "y", LabelEngine: "z"}, problems: []string{
			"address: ", `labels["model.aibrix.ai/port"]`, `labels["model.aibrix.ai/metric-port"]`, `labels["model.aibrix.ai/engine"]`}},
	} {
		got, problems := ParseTarget(c.address, c.labels, "p")
		if len(problems) != len(c.problems) {
			t.Errorf("%q %v: problems %v, want %q", c.address, c.labels, problems, c.problems)
			continue
		}
		for i, p := range problems {
			if !strings.HasPrefix(p.Error(), c.problems[i]) {
				t.Errorf("%q %v: problem %q, want %q", c.address, c.labels, p, c.problems[i])
			}
		}
		if len(problems) > 0 {
			continue
		}
		if got.Addr.String() != c.want || got.MetricPort != c.metricPort || got.Engine != c.engine || got.Pod != "p" {
			t.Errorf("%q %v: got %+v", c.address, c.labels, got)
		}
	}
}

func TestParseTargetKeepsLabels(t *testing.T) {
	got, problems := ParseTarget("10.0.0.1", map[string]string{LabelModel: "org/model", LabelEngine: "ollama"}, "")
	if len(problems) != 1 || got.Model != "org/model" || got.EngineLabel != "ollama" || got.Engine != EngineUnknown {
		t.Errorf("got %+v, %v", got, problems)
	}
}

func TestEngineNamesRoundTrip(t *testing.T) {
	for e := EngineVLLM; e <= EngineXLLM; e++ {
		if got, err := ParseEngine(e.String()); err != nil || got != e {
			t.Errorf("%v: got %v, %v", e, got, err)
		}
	}
	if EngineUnknown.String() != "unknown" {
		t.Error(EngineUnknown.String())
	}
}

func FuzzParseTarget(f *testing.F) {
	for _, s := range []string{"10.0.0.1:8000", "[::1]:9", "::1", "a:b", "[", "1.2.3.4:", "fe80::1%1:2"} {
		f.Add(s, "8000")
	}
	f.Fuzz(func(t *testing.T, address, port string) {
		got, problems := ParseTarget(address, map[string]string{LabelPort: port}, "")
		if len(problems) > 0 {
			return
		}
		again, err := netip.ParseAddrPort(got.Addr.String())
		if err != nil || again != got.Addr || got.Addr.Port() == 0 || got.Addr.Addr().Zone() != "" {
			t.Errorf("%q, %q gives %v", address, port, got.Addr)
		}
	})
}
