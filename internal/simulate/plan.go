package simulate

import (
	"errors"
	"fmt"
	"sync"
)

// Source makes a workload of a seed. It is called from several goroutines.
type Source func(seed uint64) (*Workload, error)

// Plan is a table of runs: each workload at each speed, before each number of
// Envoys, under each policy, averaged over the seeds.
type Plan struct {
	Workloads []Source
	Policies  []string
	Speeds    []float64
	Envoys    []int
	// Seed is the first of Seeds seeds.
	Seed   uint64
	Seeds  int
	Config Config
	// Capacity asks for each row's capacity, of which speed is no part.
	Capacity bool
	// Parallel is how many runs there are at the same time.
	Parallel int
}

// check says what is wrong with the plan.
func (p *Plan) check() error {
	switch {
	case len(p.Workloads) == 0 || len(p.Policies) == 0 || len(p.Speeds) == 0 || len(p.Envoys) == 0:
		return errors.New("a workload, a policy, a speed and a number of Envoys are wanted")
	case p.Seeds < 1:
		return fmt.Errorf("%d seeds: at least one is wanted", p.Seeds)
	}
	for _, s := range p.Speeds {
		if !(s > 0 && s <= 1e6) {
			return fmt.Errorf("speed %v: more than 0 is wanted", s)
		}
	}
	for _, n := range p.Envoys {
		if n < 1 {
			return fmt.Errorf("%d Envoys: at least one is wanted", n)
		}
	}
	if p.Capacity && len(p.Config.Flow.Objectives) > 0 {
		return errors.New("the capacity is not looked for with objectives")
	}
	for _, name := range p.Policies {
		if err := CheckPolicy(name); err != nil {
			return err
		}
	}
	return nil
}

// Run makes all runs and returns a row for each cell, in the order of workloads,
// speeds, Envoys and policies.
func (p *Plan) Run() ([]*Result, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	var rows []*Result
	for _, source := range p.Workloads {
		made, err := p.workload(source)
		if err != nil {
			return nil, err
		}
		rows = append(rows, made...)
	}
	return rows, nil
}

// workload makes the rows of one workload, whose requests are made once.
func (p *Plan) workload(source Source) ([]*Result, error) {
	loads := make([]*Workload, p.Seeds)
	for k := range loads {
		var err error
		if loads[k], err = source(p.Seed + uint64(k)); err != nil {
			return nil, err
		}
	}
	type cell struct {
		speed  float64
		envoys int
		policy string
	}
	var cells []cell
	for _, speed := range p.Speeds {
		for _, envoys := range p.Envoys {
			for _, policy := range p.Policies {
				cells = append(cells, cell{speed, envoys, policy})
			}
		}
	}
	results := make([]*Result, len(cells)*p.Seeds)
	errs := make([]error, len(results))
	slots := make(chan struct{}, max(1, p.Parallel))
	var wg sync.WaitGroup
	for at := range results {
		c, k := cells[at/p.Seeds], at%p.Seeds
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			cfg := p.Config
			cfg.Envoys, cfg.Seed = c.envoys, p.Seed+uint64(k)
			results[at], errs[at] = p.one(loads[k], c.policy, c.speed, cfg)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	rows := make([]*Result, len(cells))
	for i, c := range cells {
		rows[i] = Mean(results[i*p.Seeds : (i+1)*p.Seeds])
		rows[i].Speed = c.speed
	}
	return rows, nil
}

func (p *Plan) one(w *Workload, policy string, speed float64, cfg Config) (*Result, error) {
	if len(cfg.Flow.Objectives) > 0 {
		return runObjectives(w.WithSpeed(speed), policy, cfg)
	}
	r, err := Run(w.WithSpeed(speed), policy, cfg)
	if err != nil || !p.Capacity {
		return r, err
	}
	r.Capacity, err = Capacity(w, policy, cfg)
	return r, err
}
