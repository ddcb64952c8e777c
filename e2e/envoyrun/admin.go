package envoyrun

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
)

// Admin calls Envoy's admin interface, such as GET /stats or POST /drain_listeners, and returns status and body.
func (e *Envoy) Admin(ctx context.Context, method, path string) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+e.admin+path, nil)
	if err != nil {
		return 0, nil, fmt.Errorf("envoy admin %s: %w", path, err)
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("envoy admin %s: %w", path, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, nil, fmt.Errorf("envoy admin %s: %w", path, err)
	}
	return resp.StatusCode, body, nil
}

// get is Admin for a GET that must answer 200.
func (e *Envoy) get(ctx context.Context, path string) ([]byte, error) {
	status, body, err := e.Admin(ctx, http.MethodGet, path)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("envoy admin %s: status %d: %.200s", path, status, body)
	}
	return body, err
}

// Stats are Envoy's counters and gauges whose names match filter (a regular expression, "" for all); histograms and text
// readouts are left out.
func (e *Envoy) Stats(ctx context.Context, filter string) (map[string]int64, error) {
	path := "/stats?format=json"
	if filter != "" {
		path += "&filter=" + url.QueryEscape(filter)
	}
	body, err := e.get(ctx, path)
	if err != nil {
		return nil, err
	}
	return parseStats(body)
}

func parseStats(body []byte) (map[string]int64, error) {
	var page struct {
		Stats []struct {
			Name  string          `json:"name"`
			Value json.RawMessage `json:"value"`
		} `json:"stats"`
	}
	if err := json.Unmarshal(body, &page); err != nil {
		return nil, fmt.Errorf("envoy admin /stats: %w", err)
	}
	stats := make(map[string]int64, len(page.Stats))
	for _, s := range page.Stats {
		if v, err := strconv.ParseInt(string(s.Value), 10, 64); err == nil {
			stats[s.Name] = v
		}
	}
	return stats, nil
}

// ConfigDump is /config_dump?include_eds, as JSON.
func (e *Envoy) ConfigDump(ctx context.Context) ([]byte, error) {
	return e.get(ctx, "/config_dump?include_eds")
}

// Listeners are the present listeners with their addresses (host:port, or the path of a socket), by name.
func (e *Envoy) Listeners(ctx context.Context) (map[string]string, error) {
	body, err := e.get(ctx, "/listeners?format=json")
	if err != nil {
		return nil, err
	}
	return parseListeners(body)
}

func parseListeners(body []byte) (map[string]string, error) {
	var page struct {
		Statuses []struct {
			Name    string `json:"name"`
			Address struct {
				Socket struct {
					Address string `json:"address"`
					Port    int    `json:"port_value"`
				} `json:"socket_address"`
				Pipe struct {
					Path string `json:"path"`
				} `json:"pipe"`
			} `json:"local_address"`
		} `json:"listener_statuses"`
	}
	if err := json.Unmarshal(body, &page); err != nil {
		return nil, fmt.Errorf("envoy admin /listeners: %w", err)
	}
	addrs := map[string]string{}
	for _, l := range page.Statuses {
		addrs[l.Name] = l.Address.Pipe.Path
		if s := l.Address.Socket; s.Address != "" {
			addrs[l.Name] = net.JoinHostPort(s.Address, strconv.Itoa(s.Port))
		}
	}
	return addrs, nil
}

// Host is a host of a cluster, as one Envoy sees it.
type Host struct {
	// Health is what EDS says of it: HEALTHY, DRAINING and the like.
	Health string
	// Stats are its counters and gauges, such as rq_total and cx_connect_fail.
	Stats map[string]int64
}

// Hosts are the hosts of a cluster by ip:port, from /clusters; none where there is no such cluster.
func (e *Envoy) Hosts(ctx context.Context, cluster string) (map[string]Host, error) {
	body, err := e.get(ctx, "/clusters?format=json")
	if err != nil {
		return nil, err
	}
	return parseHosts(body, cluster)
}

func parseHosts(body []byte, cluster string) (map[string]Host, error) {
	var page struct {
		Clusters []struct {
			Name  string `json:"name"`
			Hosts []struct {
				Address struct {
					Socket struct {
						Address string `json:"address"`
						Port    int    `json:"port_value"`
					} `json:"socket_address"`
				} `json:"address"`
				Stats []struct {
					Name  string `json:"name"`
					Value int64  `json:"value,string"` // 0 is left out
				} `json:"stats"`
				Health struct {
					EDS string `json:"eds_health_status"`
				} `json:"health_status"`
			} `json:"host_statuses"`
		} `json:"cluster_statuses"`
	}
	if err := json.Unmarshal(body, &page); err != nil {
		return nil, fmt.Errorf("envoy admin /clusters: %w", err)
	}
	hosts := map[string]Host{}
	for _, c := range page.Clusters {
		if c.Name != cluster {
			continue
		}
		for _, h := range c.Hosts {
			host := Host{Health: h.Health.EDS, Stats: make(map[string]int64, len(h.Stats))}
			for _, s := range h.Stats {
				host.Stats[s.Name] = s.Value
			}
			hosts[net.JoinHostPort(h.Address.Socket.Address, strconv.Itoa(h.Address.Socket.Port))] = host
		}
	}
	return hosts, nil
}
