{{- define "kimi.labels" -}}
app.kubernetes.io/name: kimi
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kimi.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
