package cli

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func (a *app) initCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "init",
		Short: "Create what the store needs on its server",
		Long: `init creates the table that a PostgreSQL store needs, or the index that lets a
MongoDB store forget old keys. The other stores need nothing. It may be called
again, and by many machines at once.`,
		Args: maxArgs(0, "init takes no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			opened, err := a.open()
			if err != nil {
				return err
			}
			defer opened.Close()
			return patiently(cmd.Context(), opened.Prepare)
		},
	}
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print version and build",
		Args:  maxArgs(0, "version takes no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "leasekit %s %s %s/%s\n", buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			if err != nil {
				return &codeError{exitFailure, err}
			}
			return nil
		},
	}
}

// buildVersion is the module's version for a binary of go install, else the
// commit that it was built from, as far as the toolchain wrote it down.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}

func manCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:   "man DIRECTORY",
		Short: "Write manual pages, one for each command",
		Long:  "man writes the manual pages leasekit.1, leasekit-run.1 and so on into DIRECTORY, which it creates.",
		Args:  exactArgs(1, "man needs one directory"),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return &codeError{exitFailure, err}
			}
			root.DisableAutoGenTag = true
			header := &doc.GenManHeader{Title: "LEASEKIT", Section: "1", Source: "leasekit " + buildVersion()}
			if err := doc.GenManTree(root, header, args[0]); err != nil {
				return &codeError{exitFailure, err}
			}
			return nil
		},
	}
}
